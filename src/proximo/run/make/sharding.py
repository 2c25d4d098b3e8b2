"""Shards models over the ranks of the run, as the section `devices` says."""

from collections.abc import Sequence

import torch
from torch import nn

from proximo.config.devices import DevicesConfig
from proximo.distributed.unread_parameters import read_all
from proximo.distributed.world import current
from proximo.errors import ConfigError
from proximo.models.language import LanguageModel
from proximo.models.scalar import ScalarModel
from proximo.models.transformers_model import decoder_layers


def shard_model(
    model: LanguageModel | ScalarModel,
    devices: DevicesConfig,
    *,
    role: str,
    on_trunk: ScalarModel | None = None,
    beside: Sequence[nn.Module] = (),
) -> None:
    """Put a model on the device of this rank: a shard if its role is sharded; on the host while idle, if asked.

    Call it after copying the model and before making its optimizer. `on_trunk`: a value model on its layers.
    `beside`: models that may share its tensors. Raises ConfigError if offloading it would move tensors that another
    model uses.
    """
    world = current()
    device = world.device or model.device
    trains = any(parameter.requires_grad for parameter in model.model.parameters())
    leaves_device = devices.offload_of(role) == "idle" and not trains
    if world.size > 1 and devices.shard_of(role) != "replicate":
        _shard(model, devices, device, role=role, on_trunk=on_trunk, beside=beside, leaves_device=leaves_device)
        model.backbone.home = device
    else:
        read_all(model.model, device)
        for each in (model, on_trunk):
            if each is not None and _is_elsewhere(each.model, device):
                each.model.to(device)
    if leaves_device:
        _check_own_tensors(model, beside, role=role)
        sharding = model.backbone.sharding
        model.backbone.home = device
        model.backbone.idle = model.model if sharding is None else sharding.module
        model.backbone.idle.to("cpu")


def _shard(
    model: LanguageModel | ScalarModel,
    devices: DevicesConfig,
    device: torch.device,
    *,
    role: str,
    on_trunk: ScalarModel | None,
    beside: Sequence[nn.Module],
    leaves_device: bool,
) -> None:
    from proximo.distributed.sharding import ShardingOptions, mesh_of, shard  # takes a second, on several ranks only

    narrow = {id(weight) for weight in model.backbone.matrices} if model.precision.is_half else set[int]()
    matrices = [
        module
        for module in model.backbone.layers.modules()
        if narrow & {id(p) for p in module.parameters(recurse=False)}
    ]
    modules = [model.model, *([] if on_trunk is None else [on_trunk.base.get_submodule("score")])]
    model.backbone.sharding = shard(
        modules,
        layers=list(decoder_layers(model.base)),
        matrices=matrices,
        mesh=mesh_of(current(), device, shard_size=devices.shard_size),
        options=ShardingOptions(
            keeps_gathered=devices.shard_of(role) == "grads",
            reduces_each_microbatch=devices.reduce_gradients == "microbatch",
            offload=devices.offload_of(role) == "always",
            leaves_device=leaves_device,
            matrix_dtype=torch.bfloat16 if narrow else None,
        ),
        others={id(parameter) for module in beside for parameter in module.parameters()},
    )
    if on_trunk is not None:
        on_trunk.backbone.sharding, on_trunk.backbone.home = model.backbone.sharding, device


def _is_elsewhere(module: nn.Module, device: torch.device) -> bool:
    """Whether any tensor is on another device. A quantised module must not be moved again."""
    return any(tensor.device != device for tensors in (module.parameters(), module.buffers()) for tensor in tensors)


def _check_own_tensors(model: LanguageModel | ScalarModel, beside: Sequence[nn.Module], *, role: str) -> None:
    others = {id(parameter) for module in beside for parameter in module.parameters()}
    if any(id(parameter) in others for parameter in model.model.parameters()):
        raise ConfigError(
            f"devices.{role}.offload idle would move weights to the host that other models use at the same time, since "
            f"the {role} model shares them: set devices.{role}.offload to none"
        )
