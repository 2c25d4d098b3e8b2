"""Which folder a user means by a run, a checkpoint of it, or a model. Reads no weights."""

import re
from pathlib import Path

from proximo.checkpoint.run_folder import CHECKPOINTS, is_run_folder
from proximo.checkpoint.store import Checkpoint, CheckpointStore
from proximo.errors import RunFolderError

STEP = re.compile(r"step-0*(\d+)")
STAGES = ("ppo", "reward", "sft")
"""Of a pipeline, the last one first."""


def find_run(folder: Path) -> Path:
    """The run folder itself; of a pipeline's folder, that of its last stage which has a run.

    Raises RunFolderError where there is none.
    """
    if not folder.is_dir():
        raise RunFolderError(f"there is no run folder {folder} (seen from {Path.cwd()})")
    for candidate in (folder, *(folder / stage for stage in STAGES)):
        if is_run_folder(candidate):
            return candidate
    raise RunFolderError(f"{folder} is not the folder of a run: nothing was ever trained in it")


def find_checkpoint(folder: Path, checkpoint: str = "latest") -> Checkpoint:
    """The checkpoint of a run: `latest`, `best` or `step-N`. Raises RunFolderError where there is none."""
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
        return store.load(int(step[1]))
    found = store.latest() if checkpoint == "latest" else store.best()
    if found is None:
        raise RunFolderError(f"no checkpoint of {run} is the best: none was evaluated; {_held(store)}")
    return found


def model_of(checkpoint: Checkpoint, role: str | None = None) -> Path:
    """The folder of a role's model; without a role, that of the policy, or of what else the run trained.

    Raises RunFolderError where the checkpoint has no such model.
    """
    held = [
        name for name in ("policy", "reward", "value", "average", "reference") if (checkpoint.folder / name).is_dir()
    ]
    wanted = role or (held[0] if held else "policy")
    if wanted not in held:
        raise RunFolderError(f"the checkpoint {checkpoint.folder} has no {wanted} model; it has {', '.join(held)}")
    return checkpoint.folder / wanted


def language_model_path(path: str, checkpoint: str = "latest") -> str:
    """The path of a language model: of a run its policy, else what was given, a model folder or a Hub name."""
    return _model_path(path, checkpoint, "policy")


def reward_model_path(path: str) -> str:
    """The same of a reward model, from the newest checkpoint of a run."""
    return _model_path(path, "latest", "reward")


def _model_path(path: str, checkpoint: str, role: str) -> str:
    folder = Path(path).expanduser()
    if not folder.is_dir() or (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
        return str(folder) if folder.is_dir() else path
    return str(model_of(find_checkpoint(folder, checkpoint), role))


def _held(store: CheckpointStore) -> str:
    return f"it has {', '.join(f'step-{step:06d}' for step in store.steps())}"
