"""Finds runs, their recipes, checkpoints and models by path, and verifies their hashes. Builds no model."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proximo.checkpoint.reading import Checkpoint
from proximo.checkpoint.run_folder import CHECKPOINTS, RESOLVED_CONFIG, is_run_folder
from proximo.checkpoint.store import CheckpointStore
from proximo.config.loader import read_saved
from proximo.config.recipe import TrainerRecipe
from proximo.errors import RunFolderError
from proximo.run.preflight import MODEL_FILES, VALUE_HEAD, Input
from proximo.trainer_kinds import TrainerKind, recognise, trainer_kinds

STEP = re.compile(r"step-0*(\d+)")


def find_run(folder: Path) -> Path:
    """The folder if it is a run; for a pipeline's folder, the run of its last stage that has one.

    Raises RunFolderError if there is none.
    """
    if not folder.is_dir():
        raise RunFolderError(f"there is no run folder {folder} (seen from {Path.cwd()})")
    for candidate in _candidates(folder):
        if is_run_folder(candidate):
            return candidate
    raise RunFolderError(
        f"{folder} holds no run, nor does a stage of a pipeline in it: no checkpoints and no config.resolved.json"
    )


def _candidates(folder: Path) -> list[Path]:
    """The folder, then the folders of pipeline stages inside it, last stage first."""
    return [folder, *(folder / kind.name for kind in reversed(trainer_kinds()))]


def find_checkpoint(folder: Path, checkpoint: str = "latest") -> Checkpoint:
    """The checkpoint `latest`, `best` or `step-N` of a run, after every file was compared with its hash.

    Raises RunFolderError if there is none, CheckpointError if it is damaged.
    """
    store, step = _chosen(folder, checkpoint)
    return store.load(step)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedModel:
    """The folder of one role in a checkpoint."""

    folder: Path
    step: int


def find_model(folder: Path, checkpoint: str = "latest", role: str | None = None) -> SavedModel:
    """The model of a role in a run's checkpoint; without a role, the model that the run trained.

    Its files are compared with their hashes. Raises RunFolderError if the checkpoint has no such model, and what
    `find_checkpoint` raises.
    """
    store, step = _chosen(folder, checkpoint)
    found = store.load(step, parts=())
    held = found.roles
    wanted = role or (held[0] if held else "policy")
    if wanted not in held:
        raise RunFolderError(f"the checkpoint {found.folder} has no {wanted} model; it has {', '.join(held)}")
    return SavedModel(folder=_verified(store, step, wanted), step=step)


def language_model_path(path: str, checkpoint: str = "latest") -> str:
    """The policy's folder if `path` is a run, otherwise `path` itself, a model folder or a Hub name."""
    return _model_path(path, checkpoint, "policy")


def reward_model_path(path: str) -> str:
    """The reward model's folder in the latest checkpoint if `path` is a run, otherwise `path` itself."""
    return _model_path(path, "latest", "reward")


def _model_path(path: str, checkpoint: str, role: str) -> str:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return path
    refuse_neither(folder)
    if is_run_folder(folder) or not _holds_model(folder):
        return str(find_model(folder, checkpoint, role).folder)
    verify_model(path)
    return str(folder)


def refuse_neither(folder: Path) -> None:
    """Raises RunFolderError if the folder holds neither a model, nor a run, nor a pipeline with a run."""
    if _holds_model(folder) or any(map(is_run_folder, _candidates(folder))):
        return
    raise RunFolderError(
        f"{folder} holds no run and no model: there is no file {' and none '.join(MODEL_FILES)} in it, no checkpoint "
        "and no config.resolved.json"
    )


def _holds_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MODEL_FILES)


def verify_models(inputs: Iterable[Input]) -> None:
    """Calls `verify_model` once for each folder among the inputs of a run."""
    for path in sorted({each.name for each in inputs if each.kind == "folder"}):
        verify_model(path)


def verify_model(path: str) -> None:
    """Compare a model folder that is part of a checkpoint with its hashes.

    Other folders and names on the Hub have no hashes and are not checked. Raises CheckpointError if the checkpoint is
    damaged.
    """
    folder = Path(path).expanduser().resolve()
    step = STEP.fullmatch(folder.parent.name)
    if step is not None and folder.parent.parent.name == CHECKPOINTS and is_run_folder(folder.parents[2]):
        _verified(CheckpointStore(folder.parent.parent), int(step[1]), folder.name)


def _chosen(folder: Path, checkpoint: str) -> tuple[CheckpointStore, int]:
    run = find_run(folder)
    store = CheckpointStore(run / CHECKPOINTS)
    if not store.steps():
        raise RunFolderError(f"the run in {run} has saved no checkpoint yet")
    step = STEP.fullmatch(checkpoint)
    if checkpoint not in ("latest", "best") and step is None:
        raise RunFolderError(f"a checkpoint is called latest, best or step-N, got {checkpoint!r}; {_held(store)}")
    if step is not None and int(step[1]) not in store.steps():
        raise RunFolderError(f"the run in {run} has no checkpoint {checkpoint}; {_held(store)}")
    if step is not None:
        return store, int(step[1])
    found = store.latest() if checkpoint == "latest" else store.best()
    if found is None:
        raise RunFolderError(f"no checkpoint of {run} is the best: none was evaluated; {_held(store)}")
    return store, found.step


def _verified(store: CheckpointStore, step: int, role: str) -> Path:
    """A value model saved as a head alone also needs the policy's folder, which holds its layers."""
    folder = store.load(step, parts=()).path(role)
    return store.load(step, parts=(role, "policy") if (folder / VALUE_HEAD).exists() else (role,)).path(role)


def _held(store: CheckpointStore) -> str:
    return f"it has {', '.join(f'step-{step:06d}' for step in store.steps())}"


def saved_recipe(run: Path) -> TrainerRecipe:
    """The saved recipe. Raises RunFolderError if it is missing or damaged."""
    saved = run / RESOLVED_CONFIG
    if not saved.is_file():
        raise RunFolderError(f"{run} has no file {RESOLVED_CONFIG}, so its models and data are not known")
    try:
        content = _with_moved_paths(json.loads(saved.read_text(encoding="utf-8")), run)
        kind = recognise(content)
    except (ValueError, TypeError, KeyError) as error:  # not JSON, or not a recipe
        reason = str(error).partition("\n")[0]
        raise RunFolderError(f"{saved} is damaged ({reason}): it cannot be read") from error
    if not isinstance(kind, TrainerKind):
        names = ", ".join(each.name for each in trainer_kinds())
        raise RunFolderError(f"{saved} is for a trainer that is not installed here; installed are {names}")
    return read_saved(kind.schema, content, saved_by=None)


def _with_moved_paths(content: Any, run: Path) -> Any:
    """Rewrite the paths of a stage whose pipeline was moved from the old folder to the new one."""
    before, now = Path(content["run"]["folder"]).parent, run.parent

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: moved(part) for name, part in value.items()}
        if isinstance(value, list):
            return [moved(part) for part in value]
        if not isinstance(value, str) or not value.startswith(f"{before}/") or Path(value).exists():
            return value
        found = now / Path(value).relative_to(before)
        return str(found) if found.exists() else value

    return content if before == now else moved(content)
