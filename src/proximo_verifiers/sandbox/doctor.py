"""Tests each guarantee of the sandbox on this machine by a program that tries to break it.

`python -m proximo_verifiers.sandbox.doctor [--waive NAME] [--json]` prints the findings.
"""

import argparse
import json
import os
import select
import sys
import tempfile
from collections.abc import Collection
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from proximo_verifiers.errors import VerifierError
from proximo_verifiers.sandbox.guarantees import GUARANTEES, NAMES, check_names
from proximo_verifiers.sandbox.jobs import Program
from proximo_verifiers.sandbox.mechanisms import Mechanisms
from proximo_verifiers.sandbox.probes import PROBES, SECRET_PROGRAM, Probe
from proximo_verifiers.sandbox.runner import Sandbox

CANARY = "PROXIMO_DOCTOR_CANARY"


class State(StrEnum):
    """The state of a guarantee on this machine."""

    HELD = "held"
    """The mechanisms are there, and the program that tried to break the guarantee failed."""
    MISSING = "missing"
    """The machine lacks a mechanism."""
    BROKEN = "broken"
    """The mechanisms are there, and the program succeeded."""
    WAIVED = "waived"
    """Not held, but waived by the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GuaranteeStatus:
    """One guarantee on this machine."""

    name: str
    promise: str
    mechanism: str | None
    state: State
    reason: str | None
    """The reason why the guarantee is not held."""


def examine(*, waived: Collection[str] = (), without: Collection[str] = ()) -> list[GuaranteeStatus]:
    """The status of every guarantee. `without` is documented in `Sandbox`.

    Raises SandboxError if no program can be started at all, ConfigError for unknown names.
    """
    check_names(waived, without)
    os.environ[CANARY] = "seen"
    try:
        with Sandbox(waived=NAMES, without=without) as sandbox:
            problems = {name: _try(sandbox, probe) for name, probe in PROBES.items()}
            mechanisms = sandbox.mechanisms
    finally:
        del os.environ[CANARY]
    return [_status(name, mechanisms, problems[name], waived=name in waived) for name in NAMES]


def report(*, waived: Collection[str] = (), as_json: bool = False) -> int:
    """Prints the status of every guarantee. Returns 0 if all are held or waived, else 1. Raises what `examine` does."""
    findings = examine(waived=waived)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.state.value:8}{finding.name:18}{finding.promise}")
            if finding.mechanism is not None:
                print(f"{'':26}by: {finding.mechanism}")
            if finding.reason is not None:
                print(f"{'':26}{finding.state.value} because: {finding.reason}")
    return 0 if all(finding.state in (State.HELD, State.WAIVED) for finding in findings) else 1


def _status(name: str, mechanisms: Mechanisms, problem: str | None, *, waived: bool) -> GuaranteeStatus:
    guarantee = next(item for item in GUARANTEES if item.name == name)
    mechanism = guarantee.held_by(mechanisms)
    if mechanism is None:
        state, reason = State.MISSING, f"needs {guarantee.why_missing(mechanisms)}"
    elif problem is not None:
        state, reason = State.BROKEN, problem
    else:
        state, reason = State.HELD, None
    if waived and state is not State.HELD:
        state = State.WAIVED
    return GuaranteeStatus(name=name, promise=guarantee.promise, mechanism=mechanism, state=state, reason=reason)


def _try(sandbox: Sandbox, probe: Probe) -> str | None:
    sandbox.run(Program(source=SECRET_PROGRAM))
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory() as folder, open(reader, "rb"):
        file = Path(folder) / "file"
        file.write_text("of the host", encoding="utf-8")
        try:
            job = sandbox.start(probe.program(file=str(file), process=os.getpid(), held_open=writer))
        finally:
            os.close(writer)
        problem = probe.problem(job.wait())
        if problem is None and sorted(os.listdir(folder)) != ["file"]:
            problem = "a file was created or removed outside"
        closed, _, _ = select.select([reader], [], [], 0)
        return problem or (None if closed else "a process of the program is still running")


def main() -> int:
    """The command. Returns its exit status: 2 for an unknown guarantee, and where no program can be started."""
    parser = argparse.ArgumentParser(prog="python -m proximo_verifiers.sandbox.doctor", description=__doc__)
    parser.add_argument("--waive", action="append", default=[], help="a guarantee to run without; may be repeated")
    parser.add_argument("--json", action="store_true", help="print one JSON object per guarantee")
    given = parser.parse_args()
    try:
        return report(waived=given.waive, as_json=given.json)
    except VerifierError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
