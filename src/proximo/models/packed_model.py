"""The common base of language model and scalar model: a transformers model that runs without padding."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from proximo.models.adapter_detection import base_of, is_adapted
from proximo.models.precision.placement import Precision

if TYPE_CHECKING:  # transformers takes seconds to import
    from peft import PeftModel
    from transformers import PreTrainedModel


class PackedModel:
    """Owns a transformers model (`model`), with or without an adapter, and the backbone that runs its layers."""

    def __init__(self, model: "PreTrainedModel | PeftModel", *, precision: Precision = Precision.FLOAT32) -> None:
        from proximo.models.backbone import Backbone

        self.model = model
        self.backbone = Backbone(model, precision=precision)

    @property
    def base(self) -> "PreTrainedModel":
        """The transformers model, below an adapter if there is one."""
        return base_of(self.model)

    @property
    def has_adapter(self) -> bool:
        """True under LoRA: the base stays as it was loaded."""
        return is_adapted(self.model)

    @property
    def precision(self) -> Precision:
        """The arithmetic of the backbone; a scalar head's is at least float32."""
        return self.backbone.precision

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.backbone.device

    @property
    def position_limit(self) -> int | None:
        """Tokens that one sequence may have; None without a stated limit."""
        return self.backbone.position_limit

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Names and tensors that the optimizer updates. Tied tensors appear once."""
        return [(name, tensor) for name, tensor in self.model.named_parameters() if tensor.requires_grad]

    def use_activation_checkpointing(self) -> None:
        """Recompute activations in the backward pass; active in train mode only."""
        from proximo.models.backbone import checkpoint_activations

        checkpoint_activations(self.base)

    def compile(self, backend: str) -> None:
        """Run passes with gradients through torch.compile. Weights keep their names."""
        self.backbone.compile(backend)
