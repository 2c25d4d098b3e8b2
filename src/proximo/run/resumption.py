"""Loads the checkpoint to resume from, and compares its fingerprints with the current run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from proximo.checkpoint.fingerprints import Fingerprints, Permission, check_fingerprints, relocatable, relocated
from proximo.checkpoint.reading import Checkpoint
from proximo.checkpoint.store import CheckpointStore
from proximo.config.loader import read_saved
from proximo.config.recipe import TrainerRecipe
from proximo.run.options import RunOptions

MAY_CHANGE = (
    "run.folder",
    "run.save_every_steps",
    "run.save_every_minutes",
    "run.keep_last",
    "run.grace_seconds",
    "run.tensorboard",
    "run.sinks",
    "run.push",
    "run.token_cache",
    "devices.timeout_seconds",
)
"""Settings of every run that may change on resume: none of them affects the steps already taken. A trainer adds its own
(`config/recipe.py::TrainerRecipe.may_change`).
"""
ENVIRONMENT_SETTINGS = ("run.num_threads", "run.device", "devices", "engine")
"""Settings that may change on resume with `--allow-different-environment`, apart from the devices of single models."""


def check_settings(
    store: CheckpointStore,
    recipe: TrainerRecipe,
    options: RunOptions,
    *,
    num_ranks: int,
    functions: Mapping[str, Any],
) -> None:
    """Raises what `load_to_resume` raises for other settings, reward functions or ranks, before anything is built.

    Hashes no files. Does nothing if there is no checkpoint.
    """
    checkpoint = store.latest()
    if checkpoint is None:
        return
    saved = _saved_fingerprints(checkpoint, recipe, options.pipeline_folder)
    config = relocatable(recipe.model_dump(mode="json"), options.pipeline_folder)
    environment = {**saved.environment, "num_ranks": num_ranks}
    now = replace(saved, config=config, environment=environment, functions=functions)
    _compare(saved, now, recipe, options)


def load_to_resume(
    store: CheckpointStore, recipe: TrainerRecipe, options: RunOptions, fingerprints: Fingerprints
) -> tuple[Checkpoint, Sequence[str]]:
    """The latest checkpoint, verified, and notes of allowed differences from `fingerprints`.

    Raises CheckpointError for a damaged one, and what `check_fingerprints` raises.
    """
    checkpoint = store.load()
    saved = _saved_fingerprints(checkpoint, recipe, options.pipeline_folder)
    return checkpoint, _compare(saved, fingerprints, recipe, options)


def _compare(
    saved: Fingerprints, fingerprints: Fingerprints, recipe: TrainerRecipe, options: RunOptions
) -> Sequence[str]:
    permission = Permission(
        settings=(*MAY_CHANGE, *recipe.may_change),
        environment_settings=(*ENVIRONMENT_SETTINGS, *(f"{key}.device" for key in recipe.sections())),
        reward_settings=recipe.reward_settings,
        allow_different_environment=options.allow_different_environment,
        allow_changed_rewards=options.allow_changed_rewards,
    )
    return check_fingerprints(saved, fingerprints, permission)


def _saved_fingerprints(checkpoint: Checkpoint, recipe: TrainerRecipe, pipeline_folder: str) -> Fingerprints:
    """The saved fingerprints, their settings relative to the pipeline's folder."""
    saved = Fingerprints.from_json(checkpoint.state["fingerprints"])
    known = read_saved(
        type(recipe), relocated(saved.config, pipeline_folder), saved_by=saved.environment.get("proximo")
    )
    return replace(saved, config=relocatable(known.model_dump(mode="json"), pipeline_folder))
