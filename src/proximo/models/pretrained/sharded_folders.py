"""Models that no rank reads whole: folders with one file of weights per rank, and weights left unread in their files.

In the files of ranks (`distributed/shard_files.py`) weights have the names of the running modules. transformers stores
some architectures under other names, which `from_pretrained` expects. `assemble` makes the whole model, and
`save_pretrained` an ordinary folder from that. Unread weights (`distributed/unread_parameters.py`) stay in the files of
any folder until each rank reads its shards.
"""

import copy
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from proximo.distributed.shard_files import SavedShards, SavedTensor, fill, is_shards, saved_tensors_of
from proximo.distributed.unread_parameters import Unread, numbers_of
from proximo.errors import CheckpointError
from proximo.hub import is_local
from proximo.models.pretrained.folders import GENERATION
from proximo.models.pretrained.sources import ModelSource
from proximo.models.transformers_model import own_randomness, quiet_transformers

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


FAULTS = ("missing_keys", "unexpected_keys", "mismatched_keys")
"""Entries of transformers' report of a load that name faults."""


def unread_model(
    loader: Any, source: ModelSource, config: "PreTrainedConfig"
) -> "tuple[PreTrainedModel, dict[str, Any]] | str":
    """The model of `loader.from_pretrained` with unread parameters, and transformers' report of loading.

    transformers gets marks in place of numbers and puts them where the numbers of the files would go, so it handles
    names, tied weights and buffers. Returns the reason if that is not possible: the model must then be loaded whole.
    """
    from transformers import GenerationConfig

    if source.quantisation is not None:
        return "it is quantised while it is loaded, and never sharded"
    if (saved := _saved_tensors(source, config)) is None:
        return "its weights are not in safetensors files of the usual names"
    config = copy.deepcopy(config)
    with torch.device("meta"):
        empty = loader.from_config(config)
    if _has_conversions(empty, saved):
        return f"transformers puts weights of a {config.model_type} model together from those in its files"
    marks = {name: torch.tensor(float(number)).expand(each.shape) for number, (name, each) in enumerate(saved.items())}
    options: dict[str, Any] = {"dtype": torch.float32, "ignore_mismatched_sizes": True, "output_loading_info": True}
    model, report = type(empty).from_pretrained(None, config=config, state_dict=marks, **options)
    if not any(report[fault] for fault in FAULTS):
        if not _take_sources(model, list(saved.values())):
            return f"the files of a {config.model_type} model hold weights in other pieces than it runs with"
        _tie_equal(model, empty.all_tied_weights_keys)
    model.name_or_path = model.config.name_or_path = source.path or ""
    if model.can_generate():
        with suppress(OSError):  # without a file, it follows from the configuration
            model.generation_config = GenerationConfig.from_pretrained(
                source.path or "", revision=source.revision or "main"
            )
    return model, report


def _has_conversions(empty: "PreTrainedModel", saved: Mapping[str, SavedTensor]) -> bool:
    """Whether transformers changes a tensor of the files beyond its name."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    others = [each for each in get_model_conversion_mapping(empty) if not isinstance(each, WeightRenaming)]
    return any(each.rename_source_key(name)[1] is not None for each in others for name in saved)


def _saved_tensors(source: ModelSource, config: "PreTrainedConfig") -> dict[str, SavedTensor] | None:
    """The tensors in the files of a model, by their names there; None for another format."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    path, revision = source.path or "", source.revision
    if getattr(config, "transformers_weights", None) is not None:  # files of other names
        return None
    if is_local(path) and holds_shards(Path(path)):
        return dict(SavedShards(Path(path) / SHARDS))
    found = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    files: Any = [file] if (file := cached_file(path, SAFE_WEIGHTS_NAME, **found)) else []
    if not files and (index := cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **found)):
        files, _ = get_checkpoint_shard_files(path, index, revision=revision)
    return {name: each for file in files for name, each in saved_tensors_of(Path(file)).items()} or None


@torch.no_grad()
def _take_sources(model: "PreTrainedModel", saved: list[SavedTensor]) -> bool:
    """Replace each mark: that of a parameter by an unread parameter, that of a buffer by its numbers.

    False if a parameter is made of several marks.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                number = _mark(parameter)
                if number is None or saved[number].shape != tuple(parameter.shape):
                    return False
                made[id(parameter)] = Unread.of(saved[number], requires_grad=parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name not in module._non_persistent_buffers_set:
                number = _mark(buffer)
                if number is None or saved[number].shape != tuple(buffer.shape):
                    return False
                setattr(module, name, saved[number].read().to(buffer.dtype))
    return True


@torch.no_grad()
def _tie_equal(model: "PreTrainedModel", tied: Mapping[str, str]) -> None:
    """Tie layers of one matrix that the files hold twice. Their marks differ, so transformers did not tie them.

    `tied`: name of a tensor -> name of the tensor that it is tied to.
    """
    for target, source in tied.items():
        one, other = model.get_parameter_or_buffer(source), model.get_parameter_or_buffer(target)
        if one is not other and torch.equal(numbers_of(one), numbers_of(other)):
            module, _, name = target.rpartition(".")
            setattr(model.get_submodule(module), name, one)
            model.all_tied_weights_keys[target] = source


def _mark(tensor: Tensor) -> int | None:
    """The index of the saved tensor of a mark; None for a tensor that is not a mark."""
    is_one = all(stride == 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    return int(tensor.flatten()[0]) if is_one and tensor.dtype is torch.float32 and tensor.numel() else None
