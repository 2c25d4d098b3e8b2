"""`proximo report`: writes pages about runs, with `commands/report.py`."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from proximo.cli.arguments import loading
from proximo.errors import UserError

NICENESS = 10
"""Lower priority for a process that follows a run, which may need all processors."""


def add_to(app: typer.Typer) -> None:
    """Add report to the command line."""
    app.command()(report)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="A run folder, or a pipeline's; several are compared.",
        ),
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option(help="The page to write; default report.html in RUN, and comparison.html here for several."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Rewrite the page during the run, until it ends or Ctrl-C.")
    ] = False,
) -> None:
    """Write a page about a run: curves, samples before and after, the configuration. Or one that compares runs.

    A comparison shows settings that differ, figures before and after, alarms, curves of each metric together, and
    answers to the same prompts. Each page is one file without a network. Its place goes to stdout, alarms to stderr.

    \b
    proximo report runs/ppo
    proximo report runs/ppo --follow          during the run: the page reloads itself
    proximo report runs/demo                  of a pipeline: all stages on one page
    proximo report runs/kl-*                  side by side, in comparison.html
    proximo report runs/a runs/b --out a-and-b.html
    """
    if follow and len(runs) > 1:
        raise UserError(f"--follow is for one run, got {len(runs)}: leave it out, or give one")
    with loading("matplotlib"):
        from proximo.commands.report import COMPARISON, make_comparison, make_report

    if follow:
        _follow(runs[0], out)
        return
    made = make_report(runs[0], out) if len(runs) == 1 else make_comparison(runs, out or Path(COMPARISON))
    print(made.page)
    for line in made.alarms:
        print(line, file=sys.stderr)


def _follow(run: Path, out: Path | None) -> None:
    from proximo.commands.report import followed_report

    os.nice(NICENESS)
    print(f"following {run}; Ctrl-C ends this, and the run continues", file=sys.stderr, flush=True)
    page, alarms = None, []
    for made in followed_report(run, out):
        if page is None:
            print(made.page, flush=True)
        page, alarms = made.page, made.alarms
    for line in alarms:
        print(line, file=sys.stderr)
