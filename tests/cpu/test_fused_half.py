"""Fused layers with products in bfloat16, on a CPU: as near to the right numbers as the modules are, in less memory."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from architectures import random_sequences
from cpu.test_fused_layers import FUSED, as_modules, bytes_kept, model_of
from proximo.models.language import LanguageModel
from proximo.models.packing import Packed, pack, pack_responses
from proximo.models.precision.compute import casting
from proximo.models.precision.placement import Precision
from proximo_cpu.fused_functions import AttentionInputs, operand, result
from proximo_cpu.fused_layers import FusedLayers
from proximo_cpu.operators import Gradients, Linear, RMSNorm


def sequences() -> Packed:
    return pack([[(5 * i + n) % 50 + 3 for i in range(n)] for n in (19, 30, 21)])


def build(name: str, *, adapter: bool, precision: Precision, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """The same weights in every type."""
    model = model_of(name, adapter=adapter, precision=precision)
    model.model.to(dtype)
    return model


def everything(model: LanguageModel, hidden: Tensor) -> Tensor:
    """Hidden states and all gradients, in one row."""
    weights = [weight for name, weight in model.backbone.layers.named_parameters() if weight.requires_grad]
    given = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).cos().view_as(hidden)
    found = torch.autograd.grad(hidden, weights, given)
    assert all(gradient.dtype is weight.dtype for gradient, weight in zip(found, weights, strict=True))
    return torch.cat([each.detach().double().flatten() / each.detach().double().norm() for each in (hidden, *found)])


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "adapter"])
@pytest.mark.parametrize("name", FUSED)
def test_rounding_costs_as_much_as_in_the_modules(name: str, adapter: bool) -> None:
    exact = build(name, adapter=adapter, precision=Precision.FLOAT32, dtype=torch.float64)
    half = build(name, adapter=adapter, precision=Precision.BF16)
    right = everything(exact, as_modules(exact, sequences()))
    fused, modules = (everything(half, run(half)) for run in (lambda m: m.hidden_states(sequences()), of_modules))
    assert FusedLayers.of(half.backbone.layers, half=True) is not None
    assert (fused - right).norm() <= 3 * (modules - right).norm()
    assert (fused - right).norm() > 1e-4, "nothing was rounded to bfloat16"


def of_modules(model: LanguageModel) -> Tensor:
    return as_modules(model, sequences())


class Multiplied(TorchDispatchMode):
    """The types and numbers of rows of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()
        self.shapes: set[tuple[torch.Size, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            operands = args[-2:]
            self.types |= {each.dtype for each in operands}
            self.shapes.add(tuple(each.shape for each in operands))
        return func(*args, **(kwargs or {}))


def test_all_products_of_a_layer_are_of_bfloat16_and_of_few_shapes() -> None:
    model, shapes = build("llama", adapter=False, precision=Precision.BF16), []
    for length in (33, 40, 47, 64):
        with Multiplied() as products:
            model.hidden_states(pack([list(range(3, 3 + length // 2))] * 2)).sum().backward()
        assert products.types == {torch.bfloat16}
        shapes.append(products.shapes)
    assert all(each == shapes[0] for each in shapes)


def part(dtype: torch.dtype, **more: bool) -> AttentionInputs:
    """With nothing in it but the type of its products."""
    projection = Linear(weight=torch.zeros(1, 3))
    projections = projection, projection, projection
    return AttentionInputs(norm=None, projections=projections, head_norms=None, head_width=1, dtype=dtype, **more)


@pytest.mark.parametrize("num_rows", [0, 1, 63, 64, 65, 1000, 1025, 5000])
def test_rows_that_are_added_are_zeros_few_and_taken_away_again(num_rows: int) -> None:
    rows = torch.randn(num_rows, 3)
    padded = operand(rows, part(torch.bfloat16))
    assert len(padded) % 64 == 0
    assert num_rows <= len(padded) <= max(num_rows + 63, 1.125 * num_rows)
    assert not padded[num_rows:].any()
    assert torch.equal(result(padded, like=rows), rows.bfloat16().float())
    assert operand(rows, part(torch.float32)) is rows
    assert operand(rows, part(torch.bfloat16, narrow_heads=True)).shape == rows.shape


def test_less_is_kept_than_in_float32() -> None:
    packed = pack([list(range(3, 60)) for _ in range(8)])
    half, full = (build("llama", adapter=False, precision=each) for each in (Precision.BF16, Precision.FLOAT32))
    with casting():
        for model in (half, full):
            model.hidden_states(packed)
        kept = [bytes_kept(lambda model=model: model.hidden_states(packed)) for model in (half, full)]
    assert kept[0] < kept[1]


def test_a_frozen_model_whose_matrices_are_stored_so_gives_the_same_bits() -> None:
    model = build("gemma3", adapter=False, precision=Precision.BF16)
    model.model.requires_grad_(False)
    narrow = LanguageModel(copy.deepcopy(model.base), precision=Precision.BF16)
    narrow.narrow_frozen()
    assert any(weight.dtype is torch.bfloat16 for weight in narrow.model.parameters())
    assert FusedLayers.of(narrow.backbone.layers, half=True) is not None
    assert torch.equal(narrow.hidden_states(sequences()), model.hidden_states(sequences()))


def test_a_model_with_a_norm_in_bfloat16_runs_as_modules() -> None:
    model = build("llama", adapter=False, precision=Precision.BF16)
    model.backbone.layers.get_submodule("norm").bfloat16()
    assert FusedLayers.of(model.backbone.layers, half=True) is None


def test_two_roles_on_one_base_keep_adapters_of_their_own() -> None:
    """Within one `casting`."""
    first = build("llama", adapter=True, precision=Precision.BF16)
    tokens = random_sequences([9, 7])
    batch = pack_responses([each[:2] for each in tokens], [each[2:] for each in tokens])
    alone = first.response_logprobs(batch).logprobs
    second = copy.deepcopy(first.model, {id(w): w for w in first.model.parameters() if not w.requires_grad})
    other = LanguageModel(second, precision=Precision.BF16)
    with torch.no_grad():
        for path, weight in other.trainable_parameters():
            weight.mul_(2 if "lora_B" in path else 1)
        apart = other.response_logprobs(batch).logprobs
        with casting():
            together = [model.response_logprobs(batch).logprobs for model in (first, other)]
    assert torch.equal(together[0], alone)
    assert torch.equal(together[1], apart)
    assert not torch.equal(*together)


def test_a_norm_of_narrow_rows_computes_in_the_type_of_its_weights() -> None:
    """As norms of heads do on a device whose kernels stand aside."""
    rows, gradient = torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.linspace(0.5, 2, 24)
    norm, results = RMSNorm(weight=weight, epsilon=1e-5), []
    for dtype in (torch.bfloat16, torch.float32):
        found, given = Gradients([weight], [True]), rows.to(dtype)
        normed, inverse = norm.run(given)
        into = norm.backward(gradient.to(dtype), given, inverse, found, into=torch.empty_like(given), more=given)
        assert normed.dtype is into.dtype is dtype
        results.append((normed, into, inverse, *found.all))
    for (narrow, wide), rtol in zip(zip(*results, strict=True), (0.01, 0.01, 1e-5, 1e-5), strict=True):
        torch.testing.assert_close(narrow.float(), wide, rtol=rtol, atol=rtol)
