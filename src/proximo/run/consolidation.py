"""Makes the models of a finished run's checkpoints whole, so that each folder loads with `from_pretrained` alone."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from proximo.checkpoint.reading import Checkpoint
from proximo.checkpoint.store import CheckpointStore
from proximo.checkpoint.whole_parts import replace_shards
from proximo.models.pretrained.saving import save_pretrained
from proximo.models.pretrained.sharded import SHARDS, assemble, holds_shards
from proximo.models.pretrained.sources import ModelSource, read_config
from proximo.run.model_card import SCALAR_ROLES


def assembled_model(folder: Path, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The whole model of a role's folder with shards, on the CPU. `dtype`: None for the saved one."""
    loader = AutoModelForSequenceClassification if folder.name in SCALAR_ROLES else AutoModelForCausalLM
    return assemble(loader, read_config(ModelSource(path=str(folder))), folder, dtype=dtype)


def consolidate(store: CheckpointStore) -> None:
    """Make the models of the latest and of the best checkpoint whole. Optimizers stay as the ranks wrote them.

    One process calls it when no save is under way. It needs the memory of the host for one model at a time.
    """
    found = {each.step: each for each in (store.latest(), store.best()) if each is not None}
    for checkpoint in found.values():
        for folder in sorted(path for path in checkpoint.folder.iterdir() if path.is_dir()):
            if holds_shards(folder):
                _make_whole(checkpoint, folder)


def _make_whole(checkpoint: Checkpoint, folder: Path) -> None:
    model = assembled_model(folder)
    replace_shards(checkpoint.folder, folder.name, SHARDS, lambda path: save_pretrained(model, path))
