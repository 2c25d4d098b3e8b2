"""Frozen models in the compute type: half the memory for the same results. Never a model that trains or follows one.

What a pass would round anyway is rounded once and for all: the matrices of the layers, and that of the output layer
where it multiplies in bf16. Norms and embeddings stay float32, unless an embedding holds nothing but bf16 numbers, as
one does that was saved in bf16.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from proximo.models.language import LanguageModel
from proximo.models.scalar import ScalarModel


@torch.no_grad()
def narrow_frozen(model: LanguageModel | ScalarModel, *, beside: Iterable[nn.Module] = ()) -> None:
    """Replace what a pass would round by what it would be rounded to; nothing under float32.

    `beside`: models whose tensors are theirs, though this one may run on them too.
    """
    if not model.precision.is_half:
        return
    others = {id(tensor) for module in beside for tensor in module.parameters()}
    for weight in _rounded_anyway(model):
        if id(weight) not in others and not weight.requires_grad and weight.dtype is torch.float32:
            weight.data = weight.data.to(torch.bfloat16)


def _rounded_anyway(model: LanguageModel | ScalarModel) -> list[nn.Parameter]:
    """What a pass reads in no other way than rounded."""
    tables = [each for each in model.backbone.embeddings if _is_bf16_already(each)]
    found = [*model.backbone.matrices, *tables]
    output = _output_weight(model.base) if isinstance(model, LanguageModel) and model.head.narrow else None
    if output is not None and all(output is not table for table in model.base.get_input_embeddings().parameters()):
        found.append(output)
    return found


def _output_weight(base: PreTrainedModel) -> nn.Parameter | None:
    layer = base.get_output_embeddings()
    return layer.weight if isinstance(layer, nn.Linear) else None


def _is_bf16_already(table: Tensor) -> bool:
    return not table.is_meta and table.to(torch.bfloat16).float().equal(table)
