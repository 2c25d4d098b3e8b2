"""Optimizer state as safetensors files: exact bits, no pickle.

Optimizer state is keyed by parameter name, so that it does not depend on the order of parameters or on groups. The
settings of an optimizer (learning rate, betas) are not state: they come from the configuration and the schedule.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from proximo.distributed.shard_files import CapturedShards, SavedShards, SavedTensor, fill
from proximo.errors import CheckpointError

TENSOR = "tensor"
"""In a layout: the value is a tensor, stored separately; a scalar, or of its parameter's shape."""
OTHER_TENSOR = "tensor of another shape"
"""In a layout: the value is a tensor of another shape: a sum over rows, or the scales of quantised moments."""
Layout = dict[str, dict[str, int | float | bool | str | None]]
"""For each parameter: its fields of state, with their numbers, TENSOR or OTHER_TENSOR. JSON."""
_LAYOUT = "layout"


def optimizer_state(optimizer: Optimizer, named_parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Layout]:
    """The state of an optimizer: its tensors by "field:parameter", and the layout, which holds the plain numbers.

    The tensors are not copied. The layout has an entry for every parameter of the optimizer, empty before its first
    gradient. Raises ValueError for a parameter that has no name.
    """
    tensors: dict[str, Tensor] = {}
    layout: Layout = {}
    for name, parameter in _parameters_by_name(optimizer, named_parameters).items():
        state = optimizer.state.get(parameter, {})
        tensors |= {_key(field, name): value.detach() for field, value in state.items() if isinstance(value, Tensor)}
        layout[name] = {field: _described(value, parameter) for field, value in state.items()}
    return tensors, layout


def load_optimizer_state(
    optimizer: Optimizer,
    named_parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor | SavedTensor],
    *,
    layout: Layout,
) -> None:
    """Restore the result of `optimizer_state`, bit for bit, as copies on the devices where the optimizer wants them.

    Each rank takes its part of the tensors of a sharded parameter.

    `Optimizer.load_state_dict` is not used: it goes by position, and rounds the state to the type of the parameter.
    Raises CheckpointError, before anything is changed, if the names differ from those of the optimizer's parameters, a
    tensor is missing or unexpected, or one has another shape than its parameter.
    """
    parameters = _parameters_by_name(optimizer, named_parameters)
    _check_names(set(parameters), set(layout), what="parameters")
    kinds = (TENSOR, OTHER_TENSOR)
    fields = [(name, field) for name, state in layout.items() for field in state if state[field] in kinds]
    _check_names({_key(field, name) for name, field in fields}, set(tensors), what="tensors")
    for name, field in fields:
        if layout[name][field] == TENSOR:
            _check_shape(tensors[_key(field, name)], parameters[name], name=name, field=field)
    steps_on_device = _parameters_with_step_on_device(optimizer)
    optimizer.state.clear()
    for name, state in layout.items():
        if state:
            optimizer.state[parameters[name]].update(state)
    for name, field in fields:
        on_cpu = field == "step" and parameters[name] not in steps_on_device
        restored = _copy_like(tensors[_key(field, name)], parameters[name], on_cpu=on_cpu)
        optimizer.state[parameters[name]][field] = restored


def write_optimizer(path: Path, optimizer: Optimizer, named_parameters: Mapping[str, Tensor]) -> None:
    """Write the whole state of an optimizer to one file."""
    tensors, layout = optimizer_state(optimizer, named_parameters)
    seen: set[int] = set()
    alone = {name: _for_file(tensor, seen) for name, tensor in tensors.items()}
    save_file(alone, path, metadata={_LAYOUT: json.dumps(layout)})


def capture_optimizer(optimizer: Optimizer, named_parameters: Mapping[str, Tensor]) -> CapturedShards:
    """A copy of this rank's part of the state, to be written while training continues."""
    tensors, layout = optimizer_state(optimizer, named_parameters)
    return CapturedShards(tensors, metadata={_LAYOUT: layout})


def read_optimizer(path: Path, optimizer: Optimizer, named_parameters: Mapping[str, Tensor]) -> None:
    """Load the state from a file of `write_optimizer`, or a folder of shards, into an optimizer.

    Raises what `load_optimizer_state` raises.
    """
    if path.is_dir():
        shards = SavedShards(path)
        load_optimizer_state(optimizer, named_parameters, shards, layout=shards.metadata[_LAYOUT])
        return
    try:
        with safe_open(path, framework="pt") as file:
            metadata, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
    if _LAYOUT not in metadata:
        raise CheckpointError(f"{path} holds tensors but no optimizer state")
    load_optimizer_state(optimizer, named_parameters, tensors, layout=json.loads(metadata[_LAYOUT]))


def _key(field: str, name: str) -> str:
    return f"{field}:{name}"


def _for_file(tensor: Tensor, seen: set[int]) -> Tensor:
    """The tensor on the CPU; a copy if it shares storage with one in `seen`, which the file format refuses."""
    tensor = tensor.detach().cpu().contiguous()
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.nbytes or (storage.nbytes() and storage.data_ptr() in seen):
        return tensor.clone()
    seen.add(storage.data_ptr())
    return tensor


def _described(value: Any, parameter: Tensor) -> Any:
    """The entry of the layout for a value of the state."""
    if not isinstance(value, Tensor):
        return value
    return TENSOR if not value.dim() or value.shape == parameter.shape else OTHER_TENSOR


def _parameters_by_name(optimizer: Optimizer, named_parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = {parameter: name for name, parameter in named_parameters.items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    nameless = [tuple(parameter.shape) for parameter in parameters if parameter not in names]
    if nameless:
        raise ValueError(f"{len(nameless)} parameters of the optimizer have no name, the first of shape {nameless[0]}")
    return {names[parameter]: parameter for parameter in parameters}


def _check_names(wanted: set[str], present: set[str], *, what: str) -> None:
    missing, unexpected = sorted(wanted - present), sorted(present - wanted)
    if missing or unexpected:
        raise CheckpointError(
            f"the optimizer state of the checkpoint does not fit the model: {len(missing)} {what} are missing "
            f"{missing[:3]}, {len(unexpected)} are unexpected {unexpected[:3]}. Resume with the model settings "
            "(LoRA and frozen parts included) that the run was started with"
        )


def _check_shape(tensor: Tensor | SavedTensor, parameter: Tensor, *, name: str, field: str) -> None:
    if tensor.dim() and tensor.shape != parameter.shape:
        raise CheckpointError(
            f"the optimizer state of the checkpoint does not fit the model: {field} of {name} has shape "
            f"{tuple(tensor.shape)}, the parameter {tuple(parameter.shape)}. Resume with the model settings that the "
            "run was started with"
        )


def _parameters_with_step_on_device(optimizer: Optimizer) -> set[Tensor]:
    """Fused and capturable implementations count steps on the parameter's device, the others on the CPU."""
    groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    return {parameter for group in groups for parameter in group["params"]}


def _copy_like(saved: Tensor | SavedTensor, parameter: Tensor, *, on_cpu: bool) -> Tensor:
    if saved.shape == parameter.shape and not on_cpu:  # with the parameter's strides and sharding
        restored = torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False)
        fill(restored, saved)
        return restored
    tensor = saved.read() if isinstance(saved, SavedTensor) else saved
    return tensor.to("cpu" if on_cpu else parameter.device, copy=True)
