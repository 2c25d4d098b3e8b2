"""Resume of a run: digests of what must not have changed since, and the checkpoint to continue from."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from proximo import session_functions
from proximo.checkpoint.fingerprints import Fingerprints, Permission, check_fingerprints, relocatable, relocated
from proximo.checkpoint.reading import Checkpoint
from proximo.checkpoint.store import CheckpointStore
from proximo.config.functions import source_digest
from proximo.config.loader import read_saved
from proximo.config.recipe import Recipe, TrainerRecipe
from proximo.distributed.unread_parameters import numbers_of
from proximo.distributed.world import current
from proximo.run.make.data import SplitRows
from proximo.run.options import RunOptions
from proximo.run.preflight import inputs_of
from proximo.trainer_kinds import trainer_of

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
"""Settings that may change on resume with `--allow-different-environment`, apart from the devices of single models and
the tokens of a micro-batch, which are for a device."""


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
    checkpoint = saved_checkpoint(store, options)
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
    """The latest checkpoint, verified, and notes: of allowed differences from `fingerprints`, and of damage.

    With `--resume=auto`, which starts the run again without anybody who could choose, the newest whole one becomes the
    latest. Raises CheckpointError for a damaged one otherwise, and what `check_fingerprints` raises.
    """
    checkpoint, damages = store.newest_whole() if _passes_over_damage(options) else (store.load(), {})
    assert checkpoint is not None, "a run that is resumed has one"
    saved = _saved_fingerprints(checkpoint, recipe, options.pipeline_folder)
    notes = _compare(saved, fingerprints, recipe, options)
    store.go_back_to(checkpoint, damaged=damages)
    passed_over = (
        f"warning: the checkpoint of step {step} is passed over, and what there is of it is now in "
        f"damaged-step-{step:06d}: {why}"
        for step, why in damages.items()
    )
    return checkpoint, [*passed_over, *notes]


def saved_checkpoint(store: CheckpointStore, options: RunOptions) -> Checkpoint | None:
    """The checkpoint that a resume begins with, if only the sizes of files are compared; None if there is none."""
    return store.newest_whole(parts=())[0] if _passes_over_damage(options) else store.latest()


def _passes_over_damage(options: RunOptions) -> bool:
    return options.resume == "auto" and options.passes_over_damage


def _compare(
    saved: Fingerprints, fingerprints: Fingerprints, recipe: TrainerRecipe, options: RunOptions
) -> Sequence[str]:
    permission = Permission(
        settings=(*MAY_CHANGE, *recipe.may_change),
        environment_settings=(
            *ENVIRONMENT_SETTINGS,
            f"{trainer_of(recipe).name}.tokens_per_microbatch",
            *(f"{key}.device" for key in recipe.sections()),
        ),
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


def inputs_fingerprint(
    rows: SplitRows, tokenizer: PreTrainedTokenizerBase, models: Mapping[str, nn.Module]
) -> dict[str, Any]:
    """Name -> digest. Call it before a checkpoint is restored into the models."""
    digests = current().on_rank_0(
        lambda: {name: model_digest(model) for name, model in models.items()}, what="the digests of models"
    )
    return {"data": rows.fingerprints, "tokenizer": tokenizer_digest(tokenizer), "models": digests}


def function_sources(recipe: Recipe) -> dict[str, str | None]:
    """User-defined reward function, verifier, estimator or objective -> hash of the file that defines it.

    Imports of that file are not followed. Data functions are left out, since their rows are hashed.
    """
    scoring = [
        each for each in inputs_of(recipe) if each.key.startswith(("reward.", "gold.", "ppo.")) and ":" in each.name
    ]
    names = sorted({each.name for each in scoring if each.kind in ("function", "verifier")})
    return {
        name: source_digest(name)
        for name in names
        if not name.startswith("proximo.") or name.startswith(session_functions.MODULE)
    }


@torch.no_grad()
def model_digest(module: nn.Module) -> str:
    """SHA-256 over names, types, shapes and every bit of all parameters, also of those still in their files.

    Tensors are hashed in parallel, because hashing releases the interpreter's lock.
    """
    named = list(module.named_parameters())
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        digests = list(pool.map(_tensor_digest, (parameter for _, parameter in named)))
    whole = hashlib.sha256()
    for (name, parameter), digest in zip(named, digests, strict=True):
        whole.update(f"{name} {parameter.dtype} {tuple(parameter.shape)} {digest}\n".encode())
    return whole.hexdigest()


def _tensor_digest(tensor: Tensor) -> str:
    return hashlib.sha256(numbers_of(tensor).cpu().contiguous().flatten().view(torch.uint8).numpy()).hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of everything that determines token ids: vocabulary, merges, special tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    content = {name: part for name, part in content.items() if name not in ("padding", "truncation")}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return hashlib.sha256(json.dumps([content, special, tokenizer.chat_template], sort_keys=True).encode()).hexdigest()
