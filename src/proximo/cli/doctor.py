"""`proximo doctor`: reports what a run would find on this machine (`doctor_checks.py`, `sandbox/`, `kernels.py`)."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(rich_markup_mode=None, invoke_without_command=True)


@app.callback()
def doctor(
    context: typer.Context,
    *,
    folder: Annotated[Path, typer.Option(help="Where runs are to be written.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Report what a run would find on this machine, and what to do if something is missing.

    Versions, device, precision, threads, kernels, memory, the sandbox, vLLM, the extras, and the disk.

    \b
    proximo doctor
    proximo doctor --folder /scratch/runs     the disk of another folder
    proximo doctor sandbox                    every guarantee of the sandbox, tried
    proximo doctor kernels                    the kernels in C, compiled if needed
    """
    if context.invoked_subcommand is not None:
        return
    from proximo.cli.doctor_checks import examine_machine

    if as_json:
        print(json.dumps({name: asdict(finding) for name, finding in examine_machine(folder)}, indent=2))
        return
    for name, finding in examine_machine(folder):
        print(f"{name:12}{finding.found}", flush=True)
        if finding.advice is not None:
            print(f"{'':12}-> {finding.advice}", flush=True)


@app.command()
def kernels() -> int:
    """Compile and load the kernels in C, which are faster on a CPU. Exit status 1, with the reason, if that fails."""
    from proximo.kernels import kernels_of

    reason = kernels_of("cpu").why_missing()
    print(f"kernels in C: {kernels_of('cpu').description()}" if reason is None else reason)
    return int(reason is not None)


@app.command()
def sandbox(
    *,
    waive: Annotated[list[str] | None, typer.Option(help="A guarantee to run without; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per guarantee.")] = False,
) -> int:
    """Try every guarantee of the sandbox for programs that a model writes. Exit status 1 if one does not hold.

    \b
    proximo doctor sandbox
    proximo doctor sandbox --waive names      as with `sandbox_waived: [names]` in a recipe

    docs/sandbox.md explains each guarantee, and what none of them defends against.
    """
    from proximo.errors import as_own_errors
    from proximo_verifiers.sandbox.doctor import report

    with as_own_errors():
        return report(waived=waive or (), as_json=as_json)
