"""Stores frozen models in bf16: half the memory for the same results. Never applied to tensors that train.

Matrices that every pass would cast to bf16 are cast once, in place: those of the layers, and that of the output layer
if its products are bf16. Norms and embeddings stay float32, unless all entries of an embedding are bf16 numbers
already, as in a checkpoint that was saved in bf16.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from proximo.distributed.unread_parameters import cast, numbers_of
from proximo.models.language import LanguageModel
from proximo.models.scalar import ScalarModel

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel


@torch.no_grad()
def narrow_frozen(model: LanguageModel | ScalarModel, *, beside: Iterable[nn.Module] = ()) -> None:
    """Cast the matrices of a frozen model to bf16 in place, if its precision is bf16; else do nothing.

    `beside`: models whose tensors are not changed, even if this model shares them.
    """
    if not model.precision.is_half:
        return
    others = {id(tensor) for module in beside for tensor in module.parameters()}
    for weight in _rounded_anyway(model):
        if id(weight) not in others and not weight.requires_grad and weight.dtype is torch.float32:
            cast(weight, torch.bfloat16)


def _rounded_anyway(model: LanguageModel | ScalarModel) -> list[nn.Parameter]:
    """Weights that every pass casts to bf16, and embeddings that the cast would not change."""
    tables = [table for table in model.backbone.embeddings if _is_bf16_already(table)]
    weights = [*model.backbone.matrices, *tables]
    output = _output_weight(model.base) if isinstance(model, LanguageModel) and model.head.narrow else None
    if output is not None and all(output is not table for table in model.base.get_input_embeddings().parameters()):
        weights.append(output)
    return weights


def _output_weight(base: "PreTrainedModel") -> nn.Parameter | None:
    layer = base.get_output_embeddings()
    return layer.weight if isinstance(layer, nn.Linear) else None


def _is_bf16_already(table: Tensor) -> bool:
    if table.is_meta:
        return False
    numbers = numbers_of(table)
    return numbers.to(torch.bfloat16).float().equal(numbers)
