"""AdamW with 8-bit moments: near the one with float32, in a quarter of its memory, and resumed exactly."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from proximo.checkpoint.tensors import read_optimizer, write_optimizer
from proximo.errors import ConfigError, MissingExtraError
from proximo.learner.optimizers import OptimizerOptions, check_low_memory, make_optimizer, page_state

CPU = torch.device("cpu")
installed = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed (extra low-memory)"
)


def parameters() -> dict[str, nn.Parameter]:
    """Two matrices that are quantised, and a bias that is too small for it; always the same values."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"first": (64, 128), "second": (96, 64), "bias": (64,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def options(kind: Any) -> OptimizerOptions:
    return OptimizerOptions(learning_rate=1e-2, weight_decay=0.1, kind=kind)


def train(named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for parameter in named.values():
            parameter.grad = torch.sin(3 * parameter.detach() + step) * parameter.detach().abs()
        optimizer.step()


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


@installed
def test_twenty_steps_stay_near_those_of_float32_in_a_quarter_of_the_memory() -> None:
    wide, narrow, start = parameters(), parameters(), parameters()
    optimizers = {"adamw": make_optimizer(wide, options("adamw")), "8": make_optimizer(narrow, options("adamw_8bit"))}
    train(wide, optimizers["adamw"], range(20))
    train(narrow, optimizers["8"], range(20))
    for name in wide:
        moved = (wide[name] - start[name]).norm()
        apart = (wide[name] - narrow[name]).norm()
        assert apart < (0.1 if name != "bias" else 1e-4) * moved, name
        assert name == "bias" or apart > 1e-3 * moved, "moments of 8 bits are not exact"
    assert state_bytes(optimizers["8"]) < 0.3 * state_bytes(optimizers["adamw"])


@installed
def test_matrices_alone_decay() -> None:
    named = parameters()
    optimizer = make_optimizer(named, options("adamw_8bit"))
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(named["first"].detach(), before["first"] * (1 - 1e-2 * 0.1))
    assert torch.equal(named["bias"].detach(), before["bias"])


def check_round_trip(
    make: Callable[[], dict[str, nn.Parameter]], kind: str, file: Path, *, at: int, steps: int
) -> torch.optim.Optimizer:
    """Saved after `at` steps, read again and trained on, against all steps without a break; the restored optimizer."""
    whole, first, second = make(), make(), make()
    train(whole, make_optimizer(whole, options(kind)), range(steps))
    optimizer = make_optimizer(first, options(kind))
    train(first, optimizer, range(at))
    write_optimizer(file, optimizer, first)
    for name, parameter in second.items():
        parameter.data.copy_(first[name].data)
    restored = make_optimizer(second, options(kind))
    read_optimizer(file, restored, second)
    page_state(restored)
    train(second, restored, range(at, steps))
    assert all(torch.equal(whole[name], second[name]) for name in whole)
    return restored


@installed
def test_training_after_a_round_trip_gives_the_bits_of_uninterrupted_training(tmp_path: Path) -> None:
    check_round_trip(parameters, "adamw_8bit", tmp_path / "file", at=4, steps=7)


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'adamw_8bit needs bitsandbytes: pip install "proximo\[low-memory\]"'):
        check_low_memory("adamw_8bit", CPU)


@pytest.mark.parametrize(
    ("kind", "device", "reason"),
    [
        ("adamw_paged_8bit", "cpu", "pages its state between a CUDA device and the host, and this run is on cpu"),
        ("adamw_8bit", "mps", "runs on CUDA and on the CPU, not on mps"),
    ],
)
def test_a_machine_that_cannot_is_refused(kind: str, device: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=reason):
        check_low_memory(kind, torch.device(device))


@pytest.mark.gpu
@installed
def test_paged_moments_are_paged_again_after_a_round_trip(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an accelerator")

    def large() -> dict[str, nn.Parameter]:
        generator = torch.Generator().manual_seed(3)
        return {"matrix": nn.Parameter(torch.randn(512, 512, generator=generator).cuda())}

    restored = check_round_trip(large, "adamw_paged_8bit", tmp_path / "file", at=3, steps=5)
    assert all(state["state1"].is_paged for state in restored.state.values())
