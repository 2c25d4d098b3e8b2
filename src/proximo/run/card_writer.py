"""Puts model cards beside models. Not their text (model_card.py). A README.md that is there stays as it is."""

from pathlib import Path

from proximo.checkpoint import atomic
from proximo.checkpoint.run_folder import CHECKPOINTS
from proximo.checkpoint.store import CheckpointStore
from proximo.run.model_card import model_card

CARD = "README.md"
MODEL_FILES = ("config.json", "adapter_config.json")


def write_card(model: Path, run_folder: Path, *, role: str, step: int) -> None:
    """The card of the model in the folder `model`, which `role` was at `step` of the run."""
    if (model / CARD).exists():
        return
    is_adapter = (model / "adapter_config.json").is_file()
    text = model_card(run_folder, role=role, step=step, is_adapter=is_adapter)
    atomic.write_bytes_atomically(model / CARD, text.encode())


def write_final_cards(run_folder: Path) -> None:
    """A card for every model of the run's latest checkpoint."""
    checkpoint = CheckpointStore(run_folder / CHECKPOINTS).latest()
    if checkpoint is None:
        return
    for model in sorted(path for path in checkpoint.folder.iterdir() if path.is_dir()):
        atomic.clear_temporaries(model)
        if any((model / file).is_file() for file in MODEL_FILES):
            write_card(model, run_folder, role=model.name, step=checkpoint.step)
