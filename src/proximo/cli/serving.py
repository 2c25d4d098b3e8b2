"""`proximo serve-reward`: serves reward sources over HTTP, with `commands/serve_reward.py`."""

from typing import Annotated

import typer

from proximo.cli.loading import loading
from proximo.cli.training import Overrides, RecipeName
from proximo.user_code import functions_of_the_working_directory


def add_to(app: typer.Typer) -> None:
    """Add `proximo serve-reward` to the command line."""
    app.command("serve-reward")(serve_reward)


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
    curl http://127.0.0.1:8321/metrics -H "Authorization: Bearer $REWARD_TOKEN"

    RECIPE is a recipe of PPO or of a pipeline, of which only the reward section is read, or a file with only that
    section. The run that uses the service has in its recipe

    \b
    reward:
    - {kind: remote, url: "http://verifiers:8321", token_env: REWARD_TOKEN}

    On SIGTERM or Ctrl-C it finishes the running requests and ends. docs/remote-rewards.md.
    """
    from proximo.commands.serve_options import ServeOptions, check_options
    from proximo.config.loader import load_reward_section
    from proximo.run.preflight import check_reward_inputs

    options = ServeOptions(
        host=host,
        port=port,
        token_env=token_env,
        without_token=without_token,
        concurrency=concurrency,
        queue_size=queue_size,
        request_mib=request_mib,
        grace_seconds=grace_seconds,
    )
    check_options(options)
    sources = load_reward_section(recipe, overrides or ())
    with functions_of_the_working_directory():
        check_reward_inputs(sources)
        with loading():
            from proximo.commands.serve_reward import serve

        return serve(sources, options)
