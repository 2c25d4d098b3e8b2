"""Runs the tables of programs, several at once, and prints what was not as it must be. Under any interpreter and user.

python sandbox_battery.py GROUP[,GROUP ...] [MECHANISM ...]        mechanisms to do without
"""

import json
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path

import benign_programs
import hostile_escapes
import hostile_kernel
import hostile_processes
import hostile_resources
import hostile_secrets
import hostile_space
from sandbox_cases import Case
from sandbox_host import Host, make_host, mark_processes, processes_of, shared_objects

from proximo_verifiers.sandbox.guarantees import NAMES
from proximo_verifiers.sandbox.jobs import Program
from proximo_verifiers.sandbox.runner import Sandbox, SandboxJob

GROUPS: dict[str, tuple[Case, ...]] = {
    "network": hostile_escapes.NETWORK,
    "files": hostile_escapes.FILES,
    "processes": hostile_processes.PROCESSES,
    "signals": hostile_processes.SIGNALS,
    "kernel": hostile_kernel.KERNEL,
    "time": hostile_resources.TIME,
    "memory": hostile_space.MEMORY,
    "scratch": hostile_space.SCRATCH,
    "descriptors": hostile_resources.DESCRIPTORS,
    "output": hostile_resources.OUTPUT,
    "endings": hostile_resources.ENDINGS,
    "secrets": hostile_secrets.SECRETS,
    "benign": benign_programs.BENIGN,
}
AT_ONCE = 4
HOST = "the host afterwards"


def main(groups: str, *without: str) -> None:
    """Prints {group/case: problems} as JSON; a case that could not be tried has its reason under `skipped`."""
    folder = Path(tempfile.mkdtemp(prefix="battery-"))
    tempfile.tempdir = str(folder)
    host = make_host(folder)
    mark = mark_processes()
    before = shared_objects()
    try:
        # The host must notice what programs leave, whatever they may do: nothing but what `without` takes is waived.
        sandbox = Sandbox(waived=NAMES if without else (), without=without)
        missing = {name for name, why in sandbox.mechanisms.as_dict().items() if why is not None}
        results, skipped = {}, {}
        for group in groups.split(","):
            run = [case for case in GROUPS[group] if _reason_to_skip(case, missing) is None]
            skipped |= {
                f"{group}/{case.name}": _reason_to_skip(case, missing) for case in GROUPS[group] if case not in run
            }
            results |= {f"{group}/{name}": problems for name, problems in run_cases(sandbox, host, run).items()}
        sandbox.close()
        results[HOST] = host.changes() + _differences(before, mark, str(folder))
    finally:
        host.close()
        shutil.rmtree(folder)
    print(json.dumps({"results": results, "skipped": skipped, "mechanisms": sandbox.mechanisms.as_dict()}))


def run_cases(sandbox: Sandbox, host: Host, cases: list[Case]) -> dict[str, list[str]]:
    """Problems of each case; several programs run at once."""
    problems: dict[str, list[str]] = {}
    running: list[tuple[Case, SandboxJob]] = []
    other = f"known = 'what-another-program-knows-{os.urandom(8).hex()}'\nimport time\ntime.sleep(9)"
    for case in cases:
        if len(running) == AT_ONCE:
            _finish(*running.pop(0), problems)
        sandbox.start(Program(source=other)).kill()
        program = Program(source=host.name_places(case.source), stdin=case.stdin, files=case.files, limits=case.limits)
        running.append((case, sandbox.start(program)))
    for each in running:
        _finish(*each, problems)
    return problems


def _finish(case: Case, job: SandboxJob, problems: dict[str, list[str]]) -> None:
    problems[case.name] = case.problems(job.wait())


def _reason_to_skip(case: Case, missing: set[str]) -> str | None:
    if case.machine not in (None, platform.machine()):
        return f"for {case.machine}"
    needed = {"names": "namespaces", "thread_count": "thread_count"}
    return f"needs {case.needs}" if case.needs and needed[case.needs] in missing else None


def _differences(before: dict[str, str], mark: int, folder: str) -> list[str]:
    deadline = time.monotonic() + 100
    while processes_of(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    after = shared_objects()
    found = [f"{name} has changed: {after[name]}" for name in after if after[name] != before[name]]
    left = [name for name in os.listdir(folder) if name.startswith("proximo-sandbox-")]
    return [*found, *(f"process {pid} is left" for pid in processes_of(mark)), *(f"{name} is left" for name in left)]


if __name__ == "__main__":
    main(*sys.argv[1:])
