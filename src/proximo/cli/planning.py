"""`proximo plan`: predicts memory and FLOPs of a recipe. The work: plan/."""

import json
from typing import Annotated

import typer

from proximo.cli.configuration import KindOption, kind_of
from proximo.cli.training import Overrides, RecipeName


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
) -> int:
    """Predict peak memory, by phase and part, and the work of a step. Loads no weights and no data.

    \b
    proximo plan ppo.yaml
    proximo plan ppo.yaml ppo.tokens_per_microbatch=4096 policy.activation_checkpointing=true
    proximo plan demo --json                  every stage of a pipeline

    Models are asked for their config.json and tokenizer only. docs/plan.md says what is counted, and how well it fits.
    """
    from proximo.config.loader import load_recipe

    loaded = load_recipe(kind_of(recipe, kind), recipe, overrides or ())
    from proximo.plan.machine import device_kind, memory_bytes, process_bytes, product_rate
    from proximo.plan.stages import make_plans
    from proximo.plan.text import describe, step_seconds, to_json

    device = device_kind(loaded.recipe.run)
    process = process_bytes() if device == "cpu" else 0
    plans = make_plans(loaded.recipe, device=device)
    if as_json:
        print(json.dumps(to_json(plans, process=process), indent=2))
        return 0
    memory = memory_bytes(device)
    texts = [describe(plan, memory=memory, process=process) for plan in plans]
    if measure:
        rates = {name: product_rate(device, precision=name) for name in {plan.precision for plan in plans}}
        times = [step_seconds(plan, rates[plan.precision]) for plan in plans]
        texts = [f"{text}\n{time}" for text, time in zip(texts, times, strict=True)]
    print("\n\n".join(texts))
    return 0
