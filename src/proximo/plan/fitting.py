"""Chooses the tokens of a micro-batch by the memory of a GPU, for a recipe that leaves them out."""

import sys
from bisect import bisect_left
from pathlib import Path
from typing import TypeVar

from proximo.checkpoint.run_folder import CHECKPOINTS
from proximo.checkpoint.store import CheckpointStore
from proximo.config.recipe import TrainerRecipe
from proximo.distributed.world import current
from proximo.models.precision.placement import resolve_device
from proximo.plan.machine import memory_bytes
from proximo.plan.profiling import make_plans
from proximo.run.options import RunOptions
from proximo.run.resumption import saved_checkpoint
from proximo.trainer_kinds import trainer_of
from proximo.user_code import error_text

Fitted = TypeVar("Fitted", bound=TrainerRecipe)
KEY = "tokens_per_microbatch"
CHOICES = (2048, 4096, 8192, 16_384, 32_768)
"""More tokens than the last keep a GPU no busier."""
SHARE = 0.85
"""Of the memory. The rest is for the libraries of CUDA and for fragments."""


def is_left_out(recipe: TrainerRecipe) -> bool:
    """Whether the recipe leaves the tokens of a micro-batch to its device.

    Not beside a vLLM server, which may have most of the device, nor where an update is one micro-batch in any case.
    """
    section, engine = getattr(recipe, trainer_of(recipe).name, None), getattr(recipe, "engine", None)
    if section is None or KEY not in type(section).model_fields or KEY in section.model_fields_set:
        return False
    is_alone = engine is None or engine.kind == "local"
    return is_alone and not any(optimizer.in_backward for optimizer in recipe.optimizers().values())


def fitted(recipe: Fitted, options: RunOptions) -> Fitted:
    """The recipe with the largest micro-batch that fits its CUDA device. A run that is resumed keeps its own.

    Every rank must call it.
    """
    device = resolve_device(recipe.run.device)  # raises for one that is not there
    name, num_ranks = trainer_of(recipe).name, current().size
    section = getattr(recipe, name)

    def say(text: str) -> None:
        if not options.quiet:
            print(f"{name}: {text}", file=sys.stderr, flush=True)

    def choose() -> int:
        default = getattr(section, KEY)
        store = CheckpointStore(Path(recipe.run.folder) / CHECKPOINTS)
        if options.resume != "never" and (saved := saved_checkpoint(store, options)):
            return saved.state["fingerprints"]["config"].get(name, {}).get(KEY, default)
        say(f"choosing {name}.{KEY}, which the recipe leaves out")
        memory = memory_bytes(str(device))
        assert memory is not None, "the device was found"
        try:
            tokens, fits = fitting_tokens(recipe, memory=memory, num_ranks=num_ranks)
        except Exception as error:  # of any kind: a user's model and trainer are planned
            say(f"{name}.{KEY} is {default:,}, the default: there is no plan of it: {error_text(error)}")
            return default
        end = "fits the memory of the device" if fits else "is the least, and by the plan it does not fit the device"
        say(f"{name}.{KEY} is {tokens:,}, which {end}")
        return tokens

    tokens = current().on_rank_0(choose, what="the choice of the micro-batch")
    return recipe.model_copy(update={name: section.model_copy(update={KEY: tokens})})


def fitting_tokens(recipe: TrainerRecipe, *, memory: int, num_ranks: int = 1) -> tuple[int, bool]:
    """The most tokens in a micro-batch with which the updates fit a CUDA device, and whether they do.

    `memory`: bytes of the device. Two or three plans, of updates alone: what reads without gradients takes less. Raises
    what `make_plans` raises.
    """
    name = trainer_of(recipe).name
    section = getattr(recipe, name)

    def fits(tokens: int) -> bool:
        given = recipe.model_copy(update={name: section.model_copy(update={KEY: tokens})})
        (plan,) = make_plans(given, device="cuda", num_ranks=num_ranks, updates_only=True)
        return plan.peak <= SHARE * memory

    number = bisect_left(CHOICES, True, key=lambda tokens: not fits(tokens))
    return CHOICES[max(number - 1, 0)], number > 0
