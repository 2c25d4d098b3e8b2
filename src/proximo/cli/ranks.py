"""Runs a command on several ranks: checks their number and prepares the process of each."""

import gc
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from proximo.checkpoint.environment import versions
from proximo.checkpoint.fingerprints import differences
from proximo.distributed.failure import say, status_of
from proximo.distributed.rank_environment import Place, idle_tasks
from proximo.distributed.signals import ignore_signals
from proximo.distributed.world import World
from proximo.errors import ConfigError, JoinError

if TYPE_CHECKING:
    from proximo.config.recipe import Recipe
    from proximo.run.options import RunOptions

TIMEOUT_SECONDS = 600.0
"""How long ranks wait for each other to report that there is no valid recipe."""
MOST_DIFFERENCES = 8
"""Number of differences between two ranks that a message lists."""


def check_ranks(recipe: "Recipe", place: Place | None) -> None:
    """Raises ConfigError if the recipe cannot run on the ranks that were started, or that it asks for."""
    from proximo.config.devices import devices_conflicts

    wanted = recipe.num_ranks
    size = wanted if place is None else place.size
    if place is not None and size != wanted and any(stage.devices.num for _, stage in recipe.given_stages()):
        raise ConfigError(
            f"devices.num is {wanted}, but {place.starter} started {size} ranks: set devices.num to {size}, or "
            "remove it"
        )
    if size == 1:
        return
    if place is None and os.environ.get("WORLD_SIZE") == "1" and "RANK" in os.environ:
        raise ConfigError(
            f"devices.num is {wanted}, but torchrun started one rank: remove torchrun, or remove devices.num and give "
            f"torchrun --nproc-per-node={wanted}"
        )
    for conflict in devices_conflicts(recipe, size):
        raise ConfigError(conflict)


def _check_same(world: World, recipe: "Recipe") -> None:
    """Raises ConfigError on every rank where one of them has another recipe or other versions than rank 0."""
    mine = {**recipe.model_dump(mode="json"), "versions": versions()}
    first, *others = world.gather(mine, what="the checks of the recipe")
    for rank, other in enumerate(others, start=1):
        if found := [str(each) for each in differences(first, other)]:
            listed = "".join(f"\n  {line}" for line in found[:MOST_DIFFERENCES])
            more = f"\n  and {len(found) - MOST_DIFFERENCES} more" if len(found) > MOST_DIFFERENCES else ""
            raise ConfigError(
                f"the ranks were started differently (rank 0 -> rank {rank}): start all with one command, one recipe "
                f"file and one environment{listed}{more}"
            )


def note_idle_tasks() -> None:
    """Print a note if this process trains alone in a Slurm job that has tasks for more ranks."""
    if num := idle_tasks(os.environ):
        print(
            f"note: this Slurm job has {num} tasks, but this process trains alone: start the command by srun for "
            "a rank in each task, or set devices.num for the devices of this machine",
            file=sys.stderr,
        )


def run_rank(
    place: Place,
    prepare: "Callable[[], tuple[Recipe, RunOptions]]",
    *,
    run: "Callable[[Recipe, RunOptions], int]",
) -> int:
    """Run one of several ranks; returns its exit status. Only rank 0 prints, unless it has ended."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported; the watch names failed ranks
    if place.rank > 0:
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
    try:
        status = _join_and_run(place, prepare, run)
        gc.freeze()  # else the interpreter's exit collects garbage for seconds: sharding imports half of torch
        return status
    except BaseException as error:
        if place.rank == 0:
            raise
        if isinstance(error, JoinError):  # rank 0 does not know of it
            say(f"error: {error}")
        # Skip the interpreter's exit: threads of torch may still wait for ranks that have ended.
        os._exit(status_of(error))


def _join_and_run(
    place: Place,
    prepare: "Callable[[], tuple[Recipe, RunOptions]]",
    run: "Callable[[Recipe, RunOptions], int]",
) -> int:
    prepared, problem, timeout = None, None, TIMEOUT_SECONDS
    try:
        prepared = prepare()
        timeout = next(stage.devices.timeout_seconds for _, stage in prepared[0].given_stages())
    except Exception as error:  # the others are told once this rank has joined them
        problem = error
    from proximo.distributed.join import join

    if place.rank == 0 and prepared is not None and not prepared[1].quiet:  # one that does not come is waited for
        where = f"{place.host}:{place.port}"
        print(f"{place.size} ranks, started by {place.starter}, meet at {where}", file=sys.stderr, flush=True)
    with join(timeout_seconds=timeout, place=place) as world:
        try:
            if place.rank > 0:
                ignore_signals()
            if prepared is None:
                raise problem or AssertionError
            _check_same(world, prepared[0])
            return run(*prepared)
        except Exception as error:
            known = world.explain(error)
            if world.lost_first():
                os.write(2, f"error: {known}\n".encode())
            if known is error:
                raise
            raise known from error
