"""Chooses the tokens of a micro-batch by the memory of a GPU, for a recipe that leaves them out."""

import sys
from pathlib import Path
from typing import TypeVar

from proximo.checkpoint.run_folder import CHECKPOINTS
from proximo.checkpoint.store import CheckpointStore
from proximo.config.recipe import TrainerRecipe
from proximo.distributed.world import current
from proximo.errors import ConfigError, ModelError
from proximo.models.precision.placement import resolve_device
from proximo.plan.fake_tensor_profiler import ACTIVATIONS, WORKING
from proximo.plan.machine import memory_bytes
from proximo.plan.profiling import make_plans
from proximo.plan.record import Plan
from proximo.run.options import RunOptions
from proximo.trainer_kinds import trainer_of

Fitted = TypeVar("Fitted", bound=TrainerRecipe)
KEY = "tokens_per_microbatch"
CHOICES = (32_768, 16_384, 8192, 4096, 2048)
"""More tokens than the first keep a GPU no busier."""
SHARE = 0.85
"""Of the memory. The rest is for the libraries of CUDA and for fragments."""


def is_left_out(recipe: TrainerRecipe) -> bool:
    """Whether the recipe leaves the tokens of a micro-batch to its device.

    Not beside a vLLM server, which may have most of the device, nor where an update is one micro-batch in any case.
    """
    section, engine = getattr(recipe, trainer_of(recipe).name), getattr(recipe, "engine", None)
    is_one = any(optimizer.in_backward for optimizer in recipe.optimizers().values())
    is_alone = engine is None or engine.kind == "local"
    return KEY not in section.model_fields_set and is_alone and not is_one


def fitted(recipe: Fitted, options: RunOptions) -> Fitted:
    """The recipe with the largest micro-batch that fits its CUDA device. A run that is resumed keeps its own.

    Every rank must call it.
    """
    resolve_device(recipe.run.device)  # raises for one that is not there
    name, num_ranks = trainer_of(recipe).name, current().size
    section = getattr(recipe, name)

    def choose() -> int:
        saved = None if options.resume == "never" else CheckpointStore(Path(recipe.run.folder) / CHECKPOINTS).latest()
        if saved is not None:
            return int(saved.state["fingerprints"]["config"][name][KEY])
        memory = memory_bytes("cuda")
        assert memory is not None, "the device was found"
        tokens = fitting_tokens(recipe, memory=memory, num_ranks=num_ranks) or getattr(section, KEY)
        if not options.quiet:
            print(f"{name}: {name}.{KEY} is {tokens:,}, by the memory of the device", file=sys.stderr, flush=True)
        return tokens

    tokens = current().once(choose, what="the choice of the micro-batch")
    return recipe.model_copy(update={name: section.model_copy(update={KEY: tokens})})


def fitting_tokens(recipe: TrainerRecipe, *, memory: int, num_ranks: int = 1) -> int | None:
    """The most tokens in a micro-batch with which the updates fit a CUDA device; None where no plan can be made.

    `memory`: bytes of the device. The plan is that of updates alone: what reads without gradients takes less.
    """
    try:
        (plan,) = make_plans(recipe, device="cuda", num_ranks=num_ranks, updates_only=True)
    except (ConfigError, ModelError):  # of weights that cannot be profiled, say
        return None
    return next((tokens for tokens in CHOICES if _peak(plan, tokens) <= SHARE * memory), CHOICES[-1])


def _peak(plan: Plan, tokens: int) -> float:
    """Bytes at the peak with micro-batches of so many tokens, which hold at least one sequence."""
    longest = plan.sequence.prompt + plan.sequence.response
    growth = max(tokens, longest) / plan.microbatch_tokens
    if plan.microbatch_tokens + longest <= plan.token_budget:  # an update has no more
        growth = min(growth, 1)
    return max(
        sum(size * (growth if part in (*ACTIVATIONS, WORKING) else 1) for part, size in phase.parts.items())
        for phase in plan.phases
    )
