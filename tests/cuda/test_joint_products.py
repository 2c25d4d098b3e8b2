"""Linear layers that decode as one, beside the same layers one by one; without Triton."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from proximo.models.precision.compute import casting
from proximo_cpu.operators import Adapter, Linear
from proximo_cuda.decoder import _Joint

WIDTH, SIZES = 24, (16, 8, 8)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 4


def layers(
    ranks: Sequence[int], *, scalings: Sequence[float] = (2, 2, 2), biased: Sequence[bool] = (True, True, True)
) -> tuple[Linear, ...]:
    """Of queries, keys and values. A rank of 0: without an adapter."""
    made = []
    for i, size in enumerate(SIZES):
        adapter = None
        if ranks[i]:
            down, up = drawn(ranks[i], WIDTH, seed=3 * i), drawn(size, ranks[i], seed=3 * i + 1)
            adapter = Adapter(down=down, up=up, scaling=scalings[i])
        bias = drawn(size, seed=i + 20) if biased[i] else None
        made.append(Linear(weight=drawn(size, WIDTH, seed=i + 30), bias=bias, adapter=adapter))
    return tuple(made)


CASES = {
    "of one rank": layers((4, 4, 4)),
    "of other ranks": layers((4, 2, 1)),
    "of other scalings": layers((4, 4, 4), scalings=(2, 0.7, 0)),
    "the first of scaling 0": layers((4, 4, 4), scalings=(0, 1, 2)),
    "on some layers": layers((4, 0, 4)),
    "on none": layers((0, 0, 0)),
    "on layers of which some have a bias": layers((4, 4, 4), biased=(True, False, True)),
    "on layers without bias": layers((4, 4, 4), biased=(False, False, False)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_joint_layers_compute_what_the_layers_compute(case: str, dtype: torch.dtype) -> None:
    """In bf16 to a rounding or two."""
    rows, tolerance = drawn(5, WIDTH, seed=50).to(dtype), 1e-5 if dtype is torch.float32 else 0.03
    with casting():
        expected = torch.cat([layer.run(rows) for layer in CASES[case]], dim=1)
        found = _Joint.of(CASES[case], dtype).run(rows)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_adapters_take_two_products_for_all_layers() -> None:
    with casting():
        joint = _Joint.of(CASES["of one rank"], torch.bfloat16)
    with torch.profiler.profile() as seen:
        joint.run(drawn(5, WIDTH, seed=50).bfloat16())
    counts = {event.key: event.count for event in seen.key_averages()}
    assert {name: counts.get(name, 0) for name in ("aten::addmm", "aten::mm", "aten::addmm_")} == {
        "aten::addmm": 1, "aten::mm": 1, "aten::addmm_": 1
    }  # fmt: skip
