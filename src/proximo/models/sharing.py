"""Models that share weights: several over one base, each with its own adapter, and a value head on the policy's layers.

Over a shared base each role has its own modules and adapter, and the tensors are shared. No adapter is switched on or
off, so gradients cannot depend on the time of a switch: the modules of a role always run its own adapter, in the
forward pass and in the recomputation of activation checkpointing.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from proximo.distributed.shard_files import fill, gather_whole
from proximo.errors import CheckpointError, ModelError
from proximo.hub import is_local
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions, brings_other_vocabulary, is_on_layers_alone, load_adapter
from proximo.models.pretrained.folders import read_adapter_config
from proximo.models.pretrained.sources import ModelSource, adapter_base
from proximo.models.quantised import beside_weights, carry_flags
from proximo.models.scalar import HeadStart, ScalarModel, scalar_over
from proximo.models.transformers_model import base_of, is_adapted

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel


def base_alone(model: LanguageModel) -> LanguageModel:
    """The base below the adapter as a separate model in eval mode: the policy before training.

    Raises ModelError for a model without an adapter, since its base is trained.
    """
    return LanguageModel(_shared_base(model).eval(), precision=model.precision)


def value_on_base(policy: LanguageModel, options: LoRAOptions, start: HeadStart, *, seed: int = 0) -> ScalarModel:
    """A value model on the policy's base, with its own adapter and head.

    Raises ModelError for a policy without an adapter, and for an architecture that cannot have a scalar head.
    """
    return _scalar_on_base(policy, start, seed=seed).with_adapter(options)


def scalar_from_adapter(policy: LanguageModel, folder: Path, *, role: str) -> ScalarModel:
    """The reward or value model with the adapter and head in `folder`, on the policy's base. Both may train.

    Raises ModelError if the adapter was trained on another base or has no scalar head.
    """
    check_scalar_adapter(ModelSource(path=policy.base.name_or_path), folder, role=role)
    model = _scalar_on_base(policy, HeadStart.ZERO, seed=0)
    advice = "export it with --merge and remove share_base"
    if brings_other_vocabulary(model.base, folder):
        raise ModelError(
            f"share_base of the {role} model: the adapter in {folder} brings an embedding unlike the base's, since its "
            f"training added tokens or changed some; {advice}"
        )
    adapted = load_adapter(model.base, folder).eval()
    if not is_on_layers_alone(adapted):
        raise ModelError(
            f"share_base of the {role} model: the adapter in {folder} trained more than linear layers and a scalar "
            f"head; {advice}"
        )
    return ScalarModel(adapted, precision=policy.precision)


def check_scalar_adapter(source: ModelSource, folder: Path, *, role: str) -> None:
    """Raises ModelError unless `folder` holds an adapter with a scalar head that was trained on the model of `source`.

    Reads no weights: a base is known by its folder, or by its name and revision on the Hub.
    """
    base = adapter_base(ModelSource(path=str(folder)))
    if base is None:
        raise ModelError(
            f"share_base of the {role} model needs a folder with an adapter, and {folder} holds none: train one with "
            "model.lora, or remove share_base"
        )
    saved = read_adapter_config(folder)
    if "score" not in (saved.get("modules_to_save") or ()):
        raise ModelError(f"the adapter in {folder} has no scalar head, so it is not a {role} model")
    if _identity(base) != _identity(source):
        raise ModelError(
            f"share_base of the {role} model: the adapter in {folder} was trained on {_spelt(base)}, but the policy's "
            f"base is {_spelt(source)}; start the policy from {_spelt(base)}, or export the {role} model with --merge "
            "and remove share_base"
        )


def is_shared(first: LanguageModel | ScalarModel, second: LanguageModel | ScalarModel) -> bool:
    """True if both models run on the same base tensors."""
    return next(first.base.parameters()) is next(second.base.parameters())


def _scalar_on_base(policy: LanguageModel, start: HeadStart, *, seed: int) -> ScalarModel:
    base = _shared_base(policy)
    model = scalar_over(base.base_model, start, seed=seed, precision=policy.precision)
    carry_flags(base, model.base)
    model.backbone.balancing = policy.backbone.balancing
    return model


def _shared_base(model: LanguageModel) -> "PreTrainedModel":
    """New modules and configurations over the same parameters and buffers, without the adapter's."""
    if not is_adapted(model.model):
        raise ModelError(
            "only the base below an adapter is shared, since nothing trains it, and this model has no adapter; take a "
            "frozen_copy, or give it one"
        )
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    base = base_of(model.model)
    kept = {id(each): each for each in (*base.parameters(), *base.buffers(), *beside_weights(base))}
    for module in base.modules():
        if isinstance(module, BaseTunerLayer):  # copy the wrapped layer in place of the adapter's wrapper
            kept[id(module)] = copy.deepcopy(module.get_base_layer(), kept)
        elif isinstance(module, AuxiliaryTrainingWrapper):
            kept[id(module)] = copy.deepcopy(module.original_module, kept)
    return copy.deepcopy(base, kept)


def _identity(source: ModelSource) -> tuple[str | None, str | None]:
    if source.path is not None and is_local(source.path):
        return str(Path(source.path).expanduser().resolve()), None
    return source.path, source.revision


def _spelt(source: ModelSource) -> str:
    return source.name if source.revision is None else f"{source.name} at {source.revision}"


HEAD_FILE = "value_head.safetensors"
"""File of a value head on a trunk. The layers below it are saved with the policy."""


def scalar_on(policy: LanguageModel, start: HeadStart = HeadStart.ZERO, *, seed: int = 0) -> ScalarModel:
    """A scalar model whose layers are the policy's own modules, adapter included, with a fresh head that trains.

    The trained parameters of the layers stay those of the policy. Raises ModelError for an architecture without a
    sequence-classification model in transformers: the head could not be exported.
    """
    return scalar_over(policy.backbone.layers, start, seed=seed, precision=policy.precision)


def is_on_trunk(value: ScalarModel, policy: LanguageModel) -> bool:
    """True if both models run on the same layers, so that one pass serves both."""
    return value.backbone.layers is policy.backbone.layers


def refuse_half_shared(value: ScalarModel, policy: LanguageModel) -> None:
    """Raises ModelError if both models train shared tensors without sharing all layers: two optimizers would change
    them. A base below the adapters of both is not trained."""
    common = {id(t) for t in value.model.parameters() if t.requires_grad} & {id(t) for t in policy.model.parameters()}
    if common and not is_on_trunk(value, policy):
        raise ModelError(
            f"the value model shares {len(common)} of its tensors with the policy but is not on its trunk, so both "
            "optimizers would change them: use a separate model, or scalar_on(policy) (proximo.models.sharing)"
        )


def save_head(model: ScalarModel, folder: Path) -> None:
    """Write the head alone to a new folder."""
    write_head(_head(model), folder)


def write_head(head: Mapping[str, Tensor], folder: Path) -> None:
    """Write a head whose tensors are whole to a new folder."""
    folder.mkdir()
    tensors = {name: tensor.detach().contiguous() for name, tensor in head.items()}
    save_file(tensors, folder / HEAD_FILE, metadata={"format": "pt"})


def whole_head(model: ScalarModel) -> dict[str, Tensor]:
    """The head's tensors, gathered from all ranks, which have to call it."""
    return gather_whole(_head(model), what="gathering a value head")


@torch.no_grad()
def load_head(model: ScalarModel, folder: Path) -> None:
    """Copy the file of `save_head` into the head, bit for bit. Raises CheckpointError for the head of another model."""
    try:
        saved = load_file(folder / HEAD_FILE)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder} holds no value head that can be read: {error}") from error
    current = _head(model)
    if {name: t.shape for name, t in saved.items()} != {name: t.shape for name, t in current.items()}:
        raise CheckpointError(f"{folder} holds the value head of a model of another width than the one in use")
    for name, tensor in current.items():
        fill(tensor, saved[name])


@torch.no_grad()
def copy_head(target: ScalarModel, source: ScalarModel) -> None:
    """Copy the weights of one model's head into another's. Raises ModelError if the widths or biases differ."""
    current, given = _head(target), _head(source)
    if {name: t.shape for name, t in given.items()} != {name: t.shape for name, t in current.items()}:
        raise ModelError(
            f"the head for layers of width {current['weight'].shape[1]} cannot be taken from one of width "
            f"{given['weight'].shape[1]}, or only one of them has a bias"
        )
    for name, tensor in current.items():
        tensor.copy_(given[name])


def _head(model: ScalarModel) -> dict[str, torch.nn.Parameter]:
    """Name in a linear layer -> weight and, if there is one, bias of the head."""
    return dict(zip(("weight", "bias"), model.trained_head(), strict=False))
