"""Model folders with weights in one file per rank (`distributed/shard_files.py`), and whole models from them.

Weights have the names of the running modules. transformers stores some architectures under other names, which
`from_pretrained` expects. `assemble` makes the whole model, and `save_pretrained` an ordinary folder from that.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from proximo.distributed.shard_files import SavedShards, SavedTensor, fill, is_shards
from proximo.errors import CheckpointError
from proximo.models.pretrained.damaged_files import GENERATION
from proximo.models.pretrained.randomness import own_randomness
from proximo.models.pretrained.transformers_logging import quiet_transformers

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig, PreTrainedModel

SHARDS = "shards"
"""The folder of the weights within a model's folder."""


def holds_shards(folder: Path) -> bool:
    """Whether a model's folder holds shards and has to be assembled."""
    return is_shards(folder / SHARDS)


def saved_tensors(model: "PreTrainedModel") -> dict[str, Tensor]:
    """Every parameter once, and the buffers of a checkpoint, by the names of the running modules."""
    kept = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: each for name, each in model.named_buffers() if name in kept}


def save_configs(model: "PreTrainedModel", folder: Path) -> None:
    """Make the folder with the files of `save_pretrained` that are not weights."""
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    with quiet_transformers():
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)


def load_tensors(model: "PreTrainedModel", saved: Mapping[str, Tensor | SavedTensor], folder: Path) -> None:
    """Copy the whole tensors of `folder` into the model in place. Each rank may have a part of the model.

    Raises CheckpointError for the weights of another model; nothing is changed then.
    """
    current = saved_tensors(model) if isinstance(saved, SavedShards) else dict(model.named_parameters())
    wrong = [name for name in saved.keys() | current.keys() if _shape(saved, name) != _shape(current, name)]
    if wrong:
        raise CheckpointError(
            f"the weights in {folder} are not those of the {type(model).__name__} in use: {len(wrong)} differ in name "
            f"or shape, such as {min(wrong)}"
        )
    for name, weight in current.items():
        fill(weight, saved[name])


def assemble(
    folder: Path, config: "PreTrainedConfig | None" = None, *, loader: Any = None, dtype: torch.dtype | None = None
) -> "PreTrainedModel":
    """The whole model of a folder with shards, in eval mode on the CPU.

    `config`: None for the saved one. `loader`: an auto class (AutoModelForCausalLM), by default that of the saved
    architecture. `dtype`: None for the saved one. Raises CheckpointError for the shards of another model.
    """
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        GenerationConfig,
    )
    from transformers.initialization import no_init_weights

    if config is None:
        config = AutoConfig.from_pretrained(folder)
    if loader is None:
        is_scalar = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
        loader = AutoModelForSequenceClassification if is_scalar else AutoModelForCausalLM
    kept = dtype or getattr(torch, str(config.dtype or "float32").removeprefix("torch."))
    with quiet_transformers(), own_randomness(torch.device("cpu")), no_init_weights():
        model = loader.from_config(config, dtype=kept)
    model.tie_weights()
    load_tensors(model, SavedShards(folder / SHARDS), folder)
    if (folder / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _shape(tensors: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None
