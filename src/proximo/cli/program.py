"""Assembles the commands, and turns errors into a message and an exit status."""

import io
import os
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import cache, partial
from importlib.metadata import entry_points, version
from typing import Annotated

import typer

from proximo.cli import (
    chat,
    doctor,
    engine,
    model_commands,
    recipe_commands,
    recipes,
    reporting,
    training,
)
from proximo.errors import ConfigError, ProximoError, disk_refused, memory_ran_out, redacted
from proximo.message_text import with_addresses
from proximo.trainer_kinds import register

INTERRUPTED = 130
BROKEN_PAGE = re.compile(r" (\S*docs/[\w/-]*-)(\n *)(?=[\w.-]+\.md\b)")
"""Matches the first part of a page's name that was wrapped at a hyphen."""
HELP_OPTIONS = frozenset(("-h", "--help"))
SETTINGS = {"max_content_width": 100, "help_option_names": sorted(HELP_OPTIONS)[::-1]}
# No rich help or tracebacks: they slow down the start and rewrap the examples.
app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=SETTINGS)
for commands in (training, recipe_commands, model_commands, reporting, chat, doctor):
    commands.add_to(app)
app.add_typer(recipes.recipes_app, name="recipes")
app.add_typer(recipes.config_app, name="config")
app.add_typer(engine.app, name="engine")


def main(argv: Sequence[str]) -> int:
    """Run one command line and return its exit status: 0, 1 (the run failed), 2 (the user's mistake) or 128 + signal.

    User errors and known failures print one message on stderr; any other exception keeps its traceback.
    """
    arguments = explicit_resume(argv) or ["--help"]
    try:
        _limit_spinning_threads()
        _escape_unencodable_output()
        _register_installed_trainers()
        training.add_to(app)  # a second time, for trainers registered by installed packages
        command = typer.main.get_command(app)
        run = partial(command.main, args=arguments, prog_name="proximo", standalone_mode=False, obj=arguments)
        if not HELP_OPTIONS.intersection(arguments):
            status = run()
        else:
            with redirect_stdout(io.StringIO()) as help_text:
                status = run()
            print(with_addresses(BROKEN_PAGE.sub(r"\2\1", help_text.getvalue())), end="")
    except ProximoError as error:
        return _refuse(str(error), error.exit_status)
    except typer.TyperException as error:
        names = typer.main.get_group(app).commands
        command = f"{arguments[0]} " if arguments[0] in names else ""
        return _refuse(f"{error.format_message()} (`proximo {command}--help` tells more)", 2)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BaseException as error:
        known = _known_failure(error)
        if known is None:
            raise
        return _refuse(with_addresses(known), 1)
    return status if isinstance(status, int) else 0


@cache
def _register_installed_trainers() -> None:
    """Register the trainers that installed packages declare as entry points of the group `proximo.trainers`.

    Raises ConfigError if one cannot be loaded or registered."""
    for point in entry_points(group="proximo.trainers"):
        try:
            register(point.load())
        except Exception as error:
            raise ConfigError(
                f"the trainer {point.name} of an installed package ({point.value}) cannot be registered: {error}; fix "
                "or remove that package"
            ) from error


def _known_failure(error: BaseException) -> str | None:
    """A message for failures of the machine (memory, disk, locale); None for anything else, which may be a bug."""
    if isinstance(error, UnicodeEncodeError):
        return (
            f"the locale's encoding, {sys.getfilesystemencoding()}, has no "
            f"{error.object[error.start : error.end]!a}: set LC_ALL=C.UTF-8, or PYTHONUTF8=1"
        )
    summary = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if memory_ran_out(error):
        return (
            f"out of memory ({summary[:300]}): check the limits of the shell (`ulimit -v`), the container and the "
            "machine; `proximo plan` with the recipe shows the memory of each part"
        )
    if disk_refused(error):
        return f"disk error: {str(error)[:300]}; earlier complete files are intact (docs/checkpoint.md)"
    return None


def _limit_spinning_threads() -> None:
    """Make idle OpenMP threads sleep soon. Call it before torch is imported, because OpenMP reads the setting once.

    Spinning threads keep a core from threads with work: next to one busy program, a training step of a small model took
    many times as long with two threads as with one. With a short spin it takes about as long, and on an idle machine
    half of the second thread's gain remains (docs/memory.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _escape_unencodable_output() -> None:
    """Write characters that the locale cannot encode as escapes, so that they do not end a run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def explicit_resume(arguments: Sequence[str]) -> list[str]:
    """Replace a bare `--resume` by `--resume=must`, since the option parser supports no optional values."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    before = ["--resume=must" if argument == "--resume" else argument for argument in arguments[:end]]
    return [*before, *arguments[end:]]


def _refuse(message: str, status: int) -> int:
    print(f"error: {redacted(message)}", file=sys.stderr)
    return status


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"proximo {version('proximo')}")
        raise typer.Exit


@app.callback()
def _program(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train language models with PPO: supervised fine-tuning, a reward model, then PPO.

    \b
    proximo recipes                           the shipped recipes
    proximo recipes copy ppo my.yaml          a copy to change
    proximo doctor                            what this machine has
    proximo ppo my.yaml --dry-run             what it would do, in numbers
    proximo plan my.yaml                      memory and work, before anything is loaded
    proximo ppo my.yaml ppo.num_steps=10      do it, with a value of your own
    proximo ppo my.yaml devices.num=8         on 8 GPUs; several machines, Slurm: docs/scale.md
    proximo report runs/ppo                   curves and samples as one HTML file; of several runs side by side
    proximo report runs/ppo --follow          the same, during the run
    proximo generate runs/ppo "Once upon"     try the result
    proximo chat runs/ppo                     talk to it
    proximo serve-reward my.yaml              its reward sources for other machines

    Exit status: 0; 1 when a run fails; 2 for a mistake in what you gave; 128 plus its number when a signal stopped
    the run: 143 for SIGTERM.
    """
