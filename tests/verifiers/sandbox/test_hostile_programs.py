"""Every program of the tables, as root and as an ordinary user, with all means and with those of a poorer machine."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_battery import GROUPS, HOST

PACKAGE = Path(__file__).parents[3] / "src" / "proximo_verifiers"
ORDINARY_USER = 61_001
EVERYTHING = tuple(GROUPS)
DEPENDENT = ("network", "files", "processes", "signals", "kernel", "scratch", "secrets", "benign")
"""Groups whose outcome hangs on whether there are namespaces."""
MACHINES = {
    "root": ("root", EVERYTHING, ()),
    "root without namespaces": ("root", DEPENDENT, ("namespaces",)),
    "an ordinary user": ("user", EVERYTHING, ()),
    "an ordinary user without namespaces": ("user", DEPENDENT, ("namespaces",)),
}
CASES = [
    pytest.param(machine, case, id=f"{machine}: {case}")
    for machine, (_, groups, _) in MACHINES.items()
    for case in (*(f"{group}/{case.name}" for group in groups for case in GROUPS[group]), HOST)
]


@pytest.fixture(scope="module")
def copies() -> Iterator[Path]:
    """What the battery needs, in a folder that every user can read."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / PACKAGE.name).mkdir()
        for each in ("__init__.py", "errors.py"):
            shutil.copy(PACKAGE / each, folder / PACKAGE.name)
        shutil.copytree(PACKAGE / "sandbox", folder / PACKAGE.name / "sandbox")
        shutil.copytree(Path(__file__).parent, folder / "tests")
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield folder


@pytest.fixture(scope="module")
def reports() -> dict[str, dict]:
    """What the batteries have said so far, by machine."""
    return {}


def run_battery(copies: Path, machine: str) -> dict:
    who, groups, without = MACHINES[machine]
    if who == "root" and os.getuid() != 0:
        pytest.skip("runs as root only")
    command = [sys.executable, "-B", str(copies / "tests" / "sandbox_battery.py"), ",".join(groups), *without]
    changed: dict[str, Any] = {}
    if who == "user" and os.getuid() == 0:
        command[0] = interpreter_for_all()
        changed |= {"user": ORDINARY_USER, "group": ORDINARY_USER, "extra_groups": []}
    changed |= {"cwd": "/", "capture_output": True, "text": True, "timeout": 1200}
    environment = {"PYTHONPATH": str(copies), "PROXIMO_TEST_SECRET": "seen", "PATH": os.environ["PATH"]}
    done = subprocess.run(command, env=environment, check=False, **changed)
    *_, said = ["", *done.stderr.strip().splitlines()]
    if done.returncode != 0 and said.startswith("proximo_verifiers.errors.SandboxError: "):
        pytest.skip(f"this machine cannot: {said}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def interpreter_for_all() -> str:
    """One that an ordinary user can execute: this one, or the system's."""
    for path in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        ask = [path, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            done = subprocess.run(ask, user=ORDINARY_USER, group=ORDINARY_USER, extra_groups=[], check=False)
        except OSError:
            continue
        if done.returncode == 0:
            return path
    pytest.skip("no Python 3.11 that an ordinary user can execute")


@pytest.mark.parametrize(("machine", "case"), CASES)
def test_what_must_hold_of_each_program_holds(machine, case, copies, reports):
    if machine not in reports:
        reports[machine] = run_battery(copies, machine)
    report = reports[machine]
    if case in report["skipped"]:
        pytest.skip(f"{report['skipped'][case]}: {report['mechanisms']}")
    assert report["results"][case] == []


def test_there_are_sixty_hostile_programs_and_ten_benign_ones():
    hostile = {case.name for group, cases in GROUPS.items() if group != "benign" for case in cases}
    assert len(hostile) >= 60
    assert len(GROUPS["benign"]) >= 10


def test_without_the_filter_of_calls_the_same_programs_get_through(copies):
    # Harmless to try: the network namespace is still there.
    MACHINES["no filter"] = ("any", ("network",), ("seccomp",))
    report = run_battery(copies, "no filter")
    assert any("got through" in problems for problems in report["results"].values())
