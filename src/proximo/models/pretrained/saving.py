"""Saves weights to a Hugging Face folder and loads them back. The checkpoint store makes saves atomic."""

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from proximo.distributed.shard_files import SavedShards, fill, gather_whole, is_sharded
from proximo.distributed.world import current, whole
from proximo.errors import CheckpointError
from proximo.models.pretrained.sharded_folders import SHARDS, holds_shards, load_tensors
from proximo.models.pretrained.vocabulary import embedding_rows
from proximo.models.transformers_model import base_of, is_adapted, quiet_transformers

if TYPE_CHECKING:  # transformers takes seconds to import
    from peft import PeftModel
    from transformers import PreTrainedModel

CARD_WRITER = "create_or_update_model_card"
"""A method of peft's models."""


def save_pretrained(
    model: "PreTrainedModel | PeftModel", folder: Path, *, adapter: Mapping[str, Tensor] | None = None
) -> None:
    """Save for `from_pretrained`: the whole model, or only the adapter (with a scalar head, if there is one).

    If the run added tokens, the adapter's file has embedding and output layer: its base has no rows for them. A sharded
    model is gathered on the host of rank 0, which writes it; every rank has to call it. `adapter`: the result of
    `whole_adapter` for a sharded model, for a call on rank 0 only.
    """
    if adapter is None and any(map(is_sharded, model.parameters())):
        _save_from_ranks(model, folder)
        return
    with quiet_transformers():
        if is_adapted(model):
            with _without_card(model):
                model.save_pretrained(str(folder), save_embedding_layers=_has_other_rows(model), state_dict=adapter)
            _settle_adapter_config(folder / "adapter_config.json")
        else:
            model.save_pretrained(folder)


def _has_other_rows(model: "PeftModel") -> bool:
    """Whether the vocabulary may have other rows than the base that the adapter names: True if the base is unreadable.

    peft would ask the Hub in each save, and leave out the rows if the Hub does not answer.
    """
    from transformers import AutoConfig

    config = model.active_peft_config
    if not config.base_model_name_or_path:
        return True
    try:
        saved = AutoConfig.from_pretrained(
            config.base_model_name_or_path, revision=config.revision, local_files_only=True
        )
    except (OSError, ValueError):
        return True
    return saved.get_text_config().vocab_size != embedding_rows(base_of(model))


@torch.no_grad()
def _save_from_ranks(model: "PreTrainedModel | PeftModel", folder: Path) -> None:
    if is_adapted(model):
        adapter = whole_adapter(model)
        current().on_rank_0(lambda: save_pretrained(model, folder, adapter=adapter), what="saving an adapter")
        return
    gathered: dict[int, Tensor] = {}  # tied weights once
    state = model.state_dict(keep_vars=True)
    for tensor in state.values():
        if id(tensor) not in gathered:
            here = whole(tensor)
            gathered[id(tensor)] = here.cpu() if current().leads else here.new_empty(0)
    with quiet_transformers():
        named = {name: gathered[id(tensor)] for name, tensor in state.items()}
        current().on_rank_0(lambda: model.save_pretrained(folder, state_dict=named), what="saving a model")


@contextmanager
def _without_card(model: "PeftModel") -> Generator[None]:
    """Prevents peft's model card, which contains only the local path of the base and overwrites existing cards."""
    setattr(model, CARD_WRITER, lambda *_: None)
    try:
        yield
    finally:
        delattr(model, CARD_WRITER)


@torch.no_grad()
def load_weights(model: "PreTrainedModel | PeftModel", folder: Path) -> None:
    """Copy weights that `save_pretrained` wrote back into `model`, bit for bit and in place.

    Each rank of a sharded model takes its part. Raises CheckpointError for the weights of another model; nothing is
    changed then.
    """
    if is_adapted(model):
        _load_adapter_weights(model, folder)
        return
    if holds_shards(folder):
        load_tensors(model, SavedShards(folder / SHARDS), folder)
        return
    with quiet_transformers():
        # Through transformers, because some architectures are stored under other names and shapes than they run with.
        saved_model = type(model).from_pretrained(folder, dtype=model.dtype)
    load_tensors(model, dict(saved_model.named_parameters()), folder)


def whole_adapter(model: "PeftModel") -> dict[str, Tensor]:
    """The tensors of an adapter by their names in the model, gathered from all ranks, which have to call it."""
    state = model.state_dict()
    adapter = {id(tensor) for tensor in _adapter_tensors(model, state).values()}
    return gather_whole({name: t for name, t in state.items() if id(t) in adapter}, what="gathering an adapter")


def _settle_adapter_config(config_file: Path) -> None:
    """Targets in order, and a local base by its absolute path.

    peft writes the targets as a set, in another order in every process: the files of equal runs would differ. It writes
    the base as it was given, and a relative path is valid in one working directory only.
    """
    config = json.loads(config_file.read_text(encoding="utf-8"))
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    base = config["base_model_name_or_path"]
    if base and Path(base).is_dir():
        config["base_model_name_or_path"] = str(Path(base).absolute())
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def _load_adapter_weights(model: "PeftModel", folder: Path) -> None:
    from peft import load_peft_weights, set_peft_model_state_dict

    saved = load_peft_weights(str(folder), device="cpu")
    wanted = model.state_dict()
    if any(map(is_sharded, wanted.values())):
        _fill_adapter(_adapter_tensors(model, wanted), saved, folder)
        return
    result = set_peft_model_state_dict(model, saved)
    missing = [name for name in result.missing_keys if name in wanted and "lora_" in name]
    wrong = [*result.unexpected_keys, *missing]
    if wrong:
        raise CheckpointError(_other_adapter(folder, wrong[0]))


def _adapter_tensors(model: "PeftModel", state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the model's `state` that belong to the adapter, by their names in its file."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=_has_other_rows(model))


def _fill_adapter(tensors: dict[str, Tensor], saved: dict[str, Tensor], folder: Path) -> None:
    shapes = [{name: tuple(t.shape) for name, t in each.items()} for each in (tensors, saved)]
    wrong = sorted(name for name, _ in shapes[0].items() ^ shapes[1].items())
    if wrong:
        raise CheckpointError(_other_adapter(folder, wrong[0]))
    for name, tensor in tensors.items():
        fill(tensor, saved[name])


def _other_adapter(folder: Path, name: str) -> str:
    return f"{folder} holds the weights of another adapter than the one in use, such as {name}"
