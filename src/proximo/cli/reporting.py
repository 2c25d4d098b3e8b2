"""The commands that show runs: report, watch. The work: commands/report.py, commands/watch.py."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from proximo.cli.loading import loading
from proximo.cli.using import check_run_folder


def add_to(app: typer.Typer) -> None:
    """Add report and watch to the command line."""
    app.command()(report)
    app.command()(watch)


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
) -> None:
    """Write a page about a run: curves, samples before and after, the configuration. Or one that compares runs.

    A comparison shows settings that differ, figures before and after, alarms, curves of each metric together, and
    answers to the same prompts. Each page is one file without a network. Its place goes to stdout, alarms to stderr.

    \b
    proximo report runs/ppo
    proximo report runs/demo                  of a pipeline: all stages on one page
    proximo report runs/kl-*                  side by side, in comparison.html
    proximo report runs/a runs/b --out a-and-b.html
    """
    for run in runs:
        check_run_folder(run)
    with loading("matplotlib"):
        from proximo.commands.report import COMPARISON, make_comparison, make_report

    made = make_report(runs[0], out) if len(runs) == 1 else make_comparison(runs, out or Path(COMPARISON))
    print(made.page)
    for line in made.alarms:
        print(line, file=sys.stderr)


def watch(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A run folder, or a pipeline's; it may come later.",
        ),
    ],
    *,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 chooses a free port and prints it.")] = 0,
    wait: Annotated[
        int, typer.Option(min=0, metavar="SECONDS", help="How long to wait for a run that is not there yet.")
    ] = 600,
) -> int:
    """Show a run in a browser while it goes on: progress, curves, alarms, newest samples.

    The page follows the run by itself. It is for this machine alone (127.0.0.1), and for who knows the address that it
    prints. From elsewhere: ssh -L 8080:127.0.0.1:PORT. It only reads the files of the run, at a low priority.

    \b
    proximo watch runs/ppo
    proximo watch runs/demo --port 8080       of a pipeline: all stages on one page
    """
    if run.is_file():
        check_run_folder(run)
    from proximo.commands.watch import watch as serve

    return serve(run, port=port, wait_seconds=wait)
