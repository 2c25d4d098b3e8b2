"""Tensors and optimizer state come back in the same bits, and by name."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from proximo.checkpoint.tensors import (
    load_optimizer_state,
    optimizer_state,
    read_optimizer,
    write_optimizer,
)
from proximo.errors import CheckpointError


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """Three parameters, one of them with transposed strides; always the same values."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"layer.weight": (5, 3), "layer.bias": (5,), "head": (2, 7)}
    values = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    values["head"] = values["head"].T
    return {name: nn.Parameter(value) for name, value in values.items()}


def train(named: dict[str, nn.Parameter], optimizer: Optimizer, steps: Iterable[int], skip: str = "") -> None:
    """Steps with gradients that depend on the step and the weights."""
    for step in steps:
        for name, parameter in named.items():
            parameter.grad = None if name == skip else torch.cos(parameter.detach() * (step + 1)) / 3
        optimizer.step()


def build(kind: str, named: dict[str, nn.Parameter]) -> Optimizer:
    match kind:
        case "AdamW":
            return AdamW(named.values(), lr=0.01, betas=(0.9, 0.95))
        case "fused AdamW":
            return AdamW(named.values(), lr=0.01, betas=(0.9, 0.95), fused=True)
        case "one by one, amsgrad":
            return AdamW(named.values(), lr=0.01, foreach=False, amsgrad=True)
        case "SGD with momentum":
            return SGD(named.values(), lr=0.01, momentum=0.9)
        case "plain SGD":
            return SGD(named.values(), lr=0.01)
    raise AssertionError(kind)


KINDS = ("AdamW", "fused AdamW", "one by one, amsgrad", "SGD with momentum", "plain SGD")


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, torch.float32) for kind in KINDS), ("AdamW", torch.float64)], ids=str
)
def test_training_after_a_round_trip_gives_the_bits_of_uninterrupted_training(kind, dtype, tmp_path):
    whole = parameters(dtype)
    train(whole, build(kind, whole), range(7))

    first = parameters(dtype)
    optimizer = build(kind, first)
    train(first, optimizer, range(4))
    write_optimizer(tmp_path / "optimizer.safetensors", optimizer, first)
    weights = {name: value.detach().clone() for name, value in first.items()}

    second = parameters(dtype)
    for name, value in weights.items():
        second[name].data.copy_(value)
    optimizer = build(kind, second)
    read_optimizer(tmp_path / "optimizer.safetensors", optimizer, second)
    train(second, optimizer, range(4, 7))
    assert all(same_bits(whole[name], second[name]) for name in whole)
    assert not same_bits(whole["head"], first["head"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_that_comes_back_is_the_state_that_was_written(kind, tmp_path):
    named = parameters()
    optimizer = build(kind, named)
    train(named, optimizer, range(3))
    write_optimizer(tmp_path / "file", optimizer, named)
    fresh = parameters()
    restored = build(kind, fresh)
    read_optimizer(tmp_path / "file", restored, fresh)
    for name in named:
        before, after = optimizer.state[named[name]], restored.state[fresh[name]]
        assert list(before) == list(after)
        for field, value in before.items():
            if isinstance(value, Tensor):
                assert same_bits(value, after[field])
                assert value.stride() == after[field].stride()
                assert value.data_ptr() != after[field].data_ptr()
            else:
                assert value == after[field]


def test_state_wider_than_the_parameters_is_not_rounded(tmp_path):
    named = parameters(torch.bfloat16)
    optimizer = AdamW(named.values())
    for parameter in named.values():
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": torch.full(parameter.shape, 1 + 2**-20)}
    write_optimizer(tmp_path / "file", optimizer, named)
    fresh = parameters(torch.bfloat16)
    restored = AdamW(fresh.values())
    read_optimizer(tmp_path / "file", restored, fresh)
    for name in fresh:
        assert same_bits(restored.state[fresh[name]]["exp_avg"], torch.full(fresh[name].shape, 1 + 2**-20))


def test_state_goes_by_name_whatever_the_order_and_the_groups():
    named = parameters()
    optimizer = AdamW(named.values())
    train(named, optimizer, range(2))
    tensors, layout = optimizer_state(optimizer, named)
    fresh = parameters()
    groups = [
        {"params": [fresh["head"]], "weight_decay": 0.0},
        {"params": [fresh["layer.bias"], fresh["layer.weight"]]},
    ]
    restored = AdamW(groups)
    load_optimizer_state(restored, fresh, tensors, layout=json.loads(json.dumps(layout)))
    for name in named:
        assert same_bits(optimizer.state[named[name]]["exp_avg"], restored.state[fresh[name]]["exp_avg"])


def test_a_parameter_without_a_gradient_has_no_state_before_and_after(tmp_path):
    named = parameters()
    optimizer = AdamW(named.values())
    train(named, optimizer, range(2), skip="head")
    write_optimizer(tmp_path / "file", optimizer, named)
    fresh = parameters()
    restored = AdamW(fresh.values())
    train(fresh, restored, range(1))
    read_optimizer(tmp_path / "file", restored, fresh)
    assert fresh["head"] not in restored.state
    assert restored.state[fresh["layer.bias"]]["step"] == 2


def test_names_that_are_missing_or_unexpected_are_errors_and_change_nothing():
    named = parameters()
    optimizer = AdamW(named.values())
    train(named, optimizer, range(2))
    tensors, layout = optimizer_state(optimizer, named)

    fresh = parameters()
    fresh["adapter"] = fresh.pop("head")
    restored = AdamW(fresh.values())
    with pytest.raises(CheckpointError, match=r"1 parameters are missing \['adapter'\], 1 are unexpected \['head'\]"):
        load_optimizer_state(restored, fresh, tensors, layout=layout)
    assert not restored.state

    fewer = {key: value for key, value in tensors.items() if key != "exp_avg:head"}
    with pytest.raises(CheckpointError, match=r"1 tensors are missing \['exp_avg:head'\], 0 are unexpected"):
        load_optimizer_state(optimizer, named, fewer, layout=layout)
    with pytest.raises(CheckpointError, match=r"0 tensors are missing \[\], 1 are unexpected \['exp_avg:other'\]"):
        load_optimizer_state(optimizer, named, tensors | {"exp_avg:other": torch.zeros(1)}, layout=layout)
    assert same_bits(optimizer.state[named["head"]]["exp_avg"], tensors["exp_avg:head"])


def test_another_shape_is_an_error_that_names_the_parameter():
    named = parameters()
    optimizer = AdamW(named.values())
    train(named, optimizer, range(1))
    tensors, layout = optimizer_state(optimizer, named)
    tensors["exp_avg_sq:layer.bias"] = torch.zeros(6)
    with pytest.raises(CheckpointError, match=r"exp_avg_sq of layer\.bias has shape \(6,\), the parameter \(5,\)"):
        load_optimizer_state(optimizer, named, tensors, layout=layout)


def test_a_parameter_without_a_name_is_a_bug():
    named = parameters()
    optimizer = AdamW(named.values())
    del named["head"]
    with pytest.raises(ValueError, match=r"1 parameters of the optimizer have no name, the first of shape \(7, 2\)"):
        optimizer_state(optimizer, named)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_step_counts_return_to_the_device_where_the_optimizer_wants_them(fused, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs an accelerator")
    named = {name: nn.Parameter(value.detach().cuda()) for name, value in parameters().items()}
    optimizer = AdamW(named.values(), fused=fused)
    train(named, optimizer, range(2))
    write_optimizer(tmp_path / "file", optimizer, named)
    copies = {name: nn.Parameter(value.detach().clone()) for name, value in named.items()}
    restored = AdamW(copies.values(), fused=fused)
    read_optimizer(tmp_path / "file", restored, copies)
    for name in named:
        before, after = optimizer.state[named[name]], restored.state[copies[name]]
        assert {field: value.device for field, value in before.items()} == {
            field: value.device for field, value in after.items()
        }
    train(named, optimizer, range(2, 4))
    train(copies, restored, range(2, 4))
    assert all(torch.equal(named[name], copies[name]) for name in named)


def test_state_in_views_of_one_storage_is_written_each_for_itself(tmp_path):
    """As an optimizer of the user's own may keep it."""
    named = parameters()
    optimizer = SGD(named.values())
    flat = torch.arange(9.0)
    kept = {"left": flat[:4], "right": flat[3:7], "all": flat, "again": flat}
    optimizer.state[named["layer.bias"]] = dict(kept)
    write_optimizer(tmp_path / "file", optimizer, named)
    restored = SGD(named.values())
    read_optimizer(tmp_path / "file", restored, named)
    assert all(same_bits(restored.state[named["layer.bias"]][name], tensor) for name, tensor in kept.items())


def test_files_that_are_none_are_errors(tmp_path):
    named = parameters()
    optimizer = AdamW(named.values())
    (tmp_path / "cut").write_bytes(b"\x10\0\0\0")
    save_file({"a": torch.zeros(1)}, tmp_path / "plain")
    for name, message in (("cut", "not a readable"), ("missing", "not a readable"), ("plain", "no optimizer state")):
        with pytest.raises(CheckpointError, match=message):
            read_optimizer(Path(tmp_path, name), optimizer, named)
