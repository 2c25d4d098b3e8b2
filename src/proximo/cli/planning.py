"""`proximo plan`: predicts memory and FLOPs of a recipe, with `plan/`."""

import json
import re
from typing import TYPE_CHECKING, Annotated

import typer

from proximo.cli.configuration import KindOption, kind_of
from proximo.cli.loading import loading
from proximo.cli.training import Overrides, RecipeName
from proximo.early_interrupt import EndsSilently
from proximo.errors import ConfigError

if TYPE_CHECKING:
    from proximo.config.recipe import Recipe

_UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}


def add_to(app: typer.Typer) -> None:
    """Add `proximo plan` to the command line."""
    app.command()(plan)


def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    *,
    kind: KindOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print bytes and counts as JSON.")] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure matrix products on this machine, and estimate the time of a step."),
    ] = False,
    devices: Annotated[
        int | None,
        typer.Option("--devices", min=1, help="Plan for one of that many ranks, in place of devices.num."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Memory of one device, for example 80GiB; default this machine's.")
    ] = None,
) -> int:
    """Predict peak memory, by phase and part, and the work of a step. Loads no weights and no data.

    \b
    proximo plan ppo.yaml
    proximo plan ppo.yaml ppo.tokens_per_microbatch=4096 model.activation_checkpointing=true
    proximo plan demo --json                  every stage of a pipeline
    proximo plan ppo.yaml --devices 8 --memory 80GiB      one of 8 ranks

    It reads only config.json and tokenizer of a model. docs/plan.md says what is counted, and how accurate it is.
    """
    given = None if memory is None else parse_bytes(memory)
    with EndsSilently():
        from proximo.config.loader import load_recipe

        loaded = load_recipe(kind_of(recipe, kind), recipe, overrides or ())
    num_ranks = _num_ranks(loaded.recipe, devices)
    with loading():
        from proximo.plan.machine import device_kind, memory_bytes, process_bytes, product_rate
        from proximo.plan.profiling import make_plans
    from proximo.plan.record import describe, step_seconds, to_json

    device = device_kind(loaded.recipe.run)
    process = process_bytes() if device == "cpu" else 0
    plans = make_plans(loaded.recipe, device=device, num_ranks=num_ranks)
    if as_json:
        print(json.dumps(to_json(plans, process=process), indent=2))
        return 0
    available = memory_bytes(device) if given is None else given
    texts = [describe(plan, memory=available, process=process) for plan in plans]
    if measure:
        rates = {name: product_rate(device, precision=name) for name in {plan.precision for plan in plans}}
        times = [step_seconds(plan, rates[plan.precision]) for plan in plans]
        texts = [f"{text}\n{time}" for text, time in zip(texts, times, strict=True)]
    print("\n\n".join(texts))
    return 0


def parse_bytes(text: str) -> int:
    """Bytes of a size, for example `80GiB`. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w+)", text)
    size = int(float(match[1]) * _UNITS[match[2]]) if match is not None and match[2] in _UNITS else 0
    if size == 0:
        raise ConfigError(f"--memory takes a number above 0 with {', '.join(_UNITS)}, like 80GiB, got {text!r}")
    return size


def _num_ranks(recipe: "Recipe", devices: int | None) -> int:
    """Raises ConfigError if the recipe cannot run on that many ranks."""
    from proximo.config.devices import devices_problem

    num_ranks = devices or recipe.devices.num or 1
    if problem := devices_problem(recipe, num_ranks):
        raise ConfigError(problem)
    return num_ranks
