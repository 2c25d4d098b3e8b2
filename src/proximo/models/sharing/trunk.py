"""A value head on the policy's own layers, so that both share one trunk. Separate value models are in scalar.py."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from proximo.distributed.shard_files import fill, gather_whole
from proximo.errors import CheckpointError, ModelError
from proximo.models.language import LanguageModel
from proximo.models.scalar import HeadStart, ScalarModel, scalar_over

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
            "optimizers would change them: use a separate model, or scalar_on(policy) (proximo.models.sharing.trunk)"
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
