"""The commands that read a recipe without training it: plan, serve-reward."""

import json
import re
from typing import TYPE_CHECKING, Annotated

import typer

from proximo.cli.arguments import Overrides, RecipeName, loading
from proximo.cli.recipes import KindOption, kind_of
from proximo.errors import ConfigError
from proximo.user_code import functions_of_the_working_directory

if TYPE_CHECKING:  # importing the schemas would slow down --help
    from proximo.config.recipe import Recipe

_UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}


def add_to(app: typer.Typer) -> None:
    """Add plan and serve-reward to the command line."""
    app.command()(plan)
    app.command("serve-reward")(serve_reward)


def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    *,
    kind: KindOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print bytes and counts as JSON.")] = False,
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
    from proximo.config.loader import load_recipe

    loaded = load_recipe(kind_of(recipe, kind), recipe, overrides or ())
    num_ranks = _num_ranks(loaded.recipe, devices)
    with loading():
        from proximo.plan.machine import device_kind, memory_bytes, process_bytes
        from proximo.plan.profiling import make_plans
    from proximo.plan.record import describe, to_json

    device = device_kind(loaded.recipe.run)
    process = process_bytes() if device == "cpu" else 0
    plans = make_plans(loaded.recipe, device=device, num_ranks=num_ranks)
    if as_json:
        print(json.dumps(to_json(plans, process=process), indent=2))
        return 0
    available = memory_bytes(device) if given is None else given
    print("\n\n".join(describe(plan, memory=available, process=process) for plan in plans))
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
    from proximo.config.devices import devices_conflicts

    num_ranks = devices or recipe.devices.num or 1
    for conflict in devices_conflicts(recipe, num_ranks):
        raise ConfigError(conflict)
    return num_ranks


def serve_reward(  # noqa: PLR0913 - typer reads the options from the signature
    recipe: RecipeName,
    overrides: Overrides = None,
    *,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all addresses of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 chooses a free port and prints it.")] = 8321,
    token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with the token that clients must send.")
    ] = None,
    without_token: Annotated[
        bool, typer.Option("--without-token", help="Serve without a token on an address that is not loopback.")
    ] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests that are scored concurrently.")] = 4,
    queue_size: Annotated[
        int, typer.Option(min=0, help="Waiting requests; further ones get 503 and are retried.")
    ] = 64,
    request_mib: Annotated[int, typer.Option(min=1, help="Largest request, in MiB.")] = 64,
    grace_seconds: Annotated[int, typer.Option(min=1, help="Time for running requests after SIGTERM or Ctrl-C.")] = 25,
) -> int:
    """Serve the reward sources of a recipe over HTTP, so that verifiers run on other machines than training.

    \b
    proximo serve-reward ppo.yaml                             for this machine alone
    export REWARD_TOKEN=...                                   on both machines
    proximo serve-reward rewards.yaml --host 0.0.0.0 --token-env REWARD_TOKEN
    proximo serve-reward rewards.yaml reward.0.workers=8 --concurrency 8
    curl http://127.0.0.1:8321/health

    RECIPE is a recipe of PPO or of a pipeline, of which only the reward section is read, or a file with only that
    section. The run that uses the service has in its recipe

    \b
    reward:
    - {kind: remote, url: "http://verifiers:8321", token_env: REWARD_TOKEN}

    On SIGTERM or Ctrl-C it finishes the running requests and ends. docs/remote-rewards.md.
    """
    from proximo.commands.serve_options import check_options
    from proximo.config.loader import load_reward_section
    from proximo.run.preflight import check_reward_inputs

    check_options(host, token_env=token_env, without_token=without_token)
    sources, pipeline = load_reward_section(recipe, overrides or ())
    with functions_of_the_working_directory():
        check_reward_inputs(sources)
        with loading():
            from proximo.commands.serve_reward import serve
            from proximo.rewards.service import ServiceLimits
        if pipeline is not None:
            from proximo.commands.pipeline.run import resolved_values

            sources = [type(each).model_validate(resolved_values(each, pipeline)) for each in sources]
        limits = ServiceLimits(concurrency=concurrency, queue_size=queue_size, request_bytes=request_mib * 2**20)
        return serve(sources, (host, port), token_env=token_env, limits=limits, grace_seconds=grace_seconds)
