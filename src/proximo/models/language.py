"""The causal language model that the rest of Proximo uses: packed tokens in, log-probs out; and its base class.

Legend: T packed tokens, N response tokens, B rows of a decode step, D width, V vocabulary.
"""

import copy
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from proximo.distributed.unread_parameters import cast, numbers_of
from proximo.errors import RankError
from proximo.models.heads import OutputHead, TokenLogprobs, token_logprobs
from proximo.models.lora import LoRAOptions, add_adapter
from proximo.models.packing import Packed, PackedResponses
from proximo.models.precision.placement import Precision
from proximo.models.quantised import beside_weights
from proximo.models.transformers_model import base_of, is_adapted

if TYPE_CHECKING:  # transformers takes seconds to import
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

    from proximo.models.fast_path import Decoder


class PackedModel:
    """Owns a transformers model (`model`), with or without an adapter, and the backbone that runs its layers."""

    def __init__(self, model: "PreTrainedModel | PeftModel", *, precision: Precision = Precision.FLOAT32) -> None:
        from proximo.models.backbone import Backbone

        self.model = model
        self.base: PreTrainedModel = base_of(model)
        """The transformers model, below an adapter if there is one."""
        self.has_adapter = is_adapted(model)
        """True under LoRA: the base stays as it was loaded."""
        self.backbone = Backbone(model, precision=precision)

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

    @torch.no_grad()
    def narrow_frozen(self, *, beside: Iterable[nn.Module] = ()) -> None:
        """Cast the matrices of a frozen model to bf16 in place, if its precision is bf16; else do nothing.

        It then takes half the memory for the same results: only matrices are cast that every pass would cast, and
        embeddings whose entries are bf16 numbers already, as in a checkpoint that was saved in bf16. Norms and other
        embeddings stay float32. `beside`: models whose tensors are not changed, even if this model shares them.
        """
        if not self.precision.is_half:
            return
        others = {id(tensor) for module in beside for tensor in module.parameters()}
        for weight in self._rounded_anyway():
            if id(weight) not in others and not weight.requires_grad and weight.dtype is torch.float32:
                cast(weight, torch.bfloat16)

    def _rounded_anyway(self) -> list[nn.Parameter]:
        """Weights that every pass casts to bf16, and embeddings that the cast would not change."""
        return [*self.backbone.matrices, *filter(_is_bf16_already, self.backbone.embeddings)]

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Put all modules into eval mode inside; restore the mode of each one afterwards."""
        before = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            yield
        finally:
            for module, training in before:
                module.training = training

    def use_activation_checkpointing(self) -> None:
        """Recompute activations in the backward pass; active in train mode only."""
        from proximo.models.backbone import checkpoint_activations

        checkpoint_activations(self.base)

    def compile(self, backend: str) -> None:
        """Run all passes but sampling through torch.compile. Weights keep their names."""
        self.backbone.compile(backend)


class LanguageModel(PackedModel):
    """A causal language model. Under LoRA the reference is the base below the adapter (sharing.py)."""

    @property
    def head(self) -> OutputHead:
        """The output head, read from the model at each access, because weights may be moved or replaced."""
        path = self.backbone.path
        return OutputHead.of(self.base, narrow=path.bf16_head, logits_bytes=path.logits_bytes)

    def _rounded_anyway(self) -> list[nn.Parameter]:
        """With the output layer, if its products are bf16 and it is not the embedding."""
        layer, tables = self.base.get_output_embeddings(), list(self.base.get_input_embeddings().parameters())
        narrow = self.head.narrow and isinstance(layer, nn.Linear) and all(layer.weight is not each for each in tables)
        return [*super()._rounded_anyway(), *([layer.weight] if narrow else [])]

    @property
    def adapter_config(self) -> "PeftConfig | None":
        """The adapter's configuration; None without an adapter."""
        return self.model.active_peft_config if is_adapted(self.model) else None

    @property
    def vocab_size(self) -> int:
        """V, the rows of the output layer. May exceed the tokenizer's size."""
        return self.head.weight.shape[0]

    def hidden_states(self, packed: Packed, rows: Int64[Tensor, "rows"] | None = None) -> Float[Tensor, "rows hidden"]:
        """Hidden states [T, D] after the final norm, or [R, D] of the distinct flat indices `rows`."""
        return self.backbone.packed(packed, rows=rows)

    def response_logprobs(
        self, batch: PackedResponses, *, temperature: float = 1.0, entropy: bool = False
    ) -> TokenLogprobs:
        """log softmax(logits / temperature) of each response token, [N] in at least float32; differentiable.

        The softmax is over the tokens that the draw chose among.
        """
        hidden = self.hidden_states(batch.packed, batch.predictors)
        return self.logprobs_from(hidden, batch, temperature=temperature, entropy=entropy)

    def logprobs_from(
        self,
        hidden: Float[Tensor, "responded hidden"],
        batch: PackedResponses,
        *,
        temperature: float,
        entropy: bool = False,
    ) -> TokenLogprobs:
        """As `response_logprobs`, from the hidden states [N, D] before each response token."""
        mask = batch.sampling_mask
        return token_logprobs(
            hidden, self.head, batch.targets, temperature=temperature, entropy=entropy, sampling_mask=mask
        )

    def prefill(self, packed: Packed, cache: "Cache") -> Float[Tensor, "sequences hidden"]:
        """Hidden states of the last token of each packed prompt, [S, D]; fills the cache."""
        return self.backbone.packed(packed, rows=packed.last_indices, cache=cache)

    def decoder(self) -> "Decoder":
        """The function that decodes one more token for each row. Obtain it once per rollout; it is valid until modules,
        hooks or adapters change."""
        return self.backbone.decoder()

    def with_adapter(self, options: LoRAOptions) -> "LanguageModel":
        """The same model with LoRA added and all other weights frozen."""
        adapted = LanguageModel(add_adapter(self.base, options), precision=self.precision)
        adapted.backbone.balancing = self.backbone.balancing
        return adapted

    def frozen_copy(self) -> "LanguageModel":
        """A frozen copy in eval mode. Trainable tensors are copied; frozen ones, such as an adapter's base, are
        shared. Raises RankError for a model that is sharded already, whose copy would wait for ranks that run none."""
        if self.backbone.sharding is not None:
            raise RankError(
                "a model that is sharded over ranks is not copied, since every pass of the copy would need all ranks: "
                "make what needs a copy, such as an engine, before the trainer, or from a model of its own"
            )
        fixed = (weight for weight in self.model.parameters() if not weight.requires_grad)
        shared = {id(state): state for state in (*fixed, *beside_weights(self.model))}
        model = copy.deepcopy(self.model, shared).eval().requires_grad_(False)
        return LanguageModel(model, precision=self.precision)


def _is_bf16_already(table: Tensor) -> bool:
    if table.is_meta:
        return False
    numbers = numbers_of(table)
    return numbers.to(torch.bfloat16).float().equal(numbers)
