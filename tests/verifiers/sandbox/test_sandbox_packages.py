"""Packages beside the standard library: which are found, that they can be imported, and that they cannot be changed."""

import os
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_cases import Case, says, tries

from proximo_verifiers.errors import SandboxError
from proximo_verifiers.sandbox.jobs import Program
from proximo_verifiers.sandbox.packages import find_packages
from proximo_verifiers.sandbox.runner import Sandbox

MACHINES = {"all means": {}, "without namespaces": {"without": ["namespaces"], "waived": ["names"]}}
BEFORE = """
import numpy
numpy_file, numpy_folder = numpy.__file__, os.path.dirname(numpy.__file__)
os.symlink(numpy_file, "link")
"""
ATTACKS = (
    tries(
        "a package changed",
        "open(numpy_file, 'a')",
        "os.truncate(numpy_file, 0)",
        "os.unlink(numpy_file)",
        "os.rename(numpy_file, 'mine')",
        "os.link(numpy_file, 'mine')",
        "os.mkdir(numpy_folder + '/proximo-escape')",
        "open(os.path.dirname(numpy_folder) + '/proximo_escape.py', 'w')",
        "os.chmod(numpy_file, 0o777)",
        "os.chmod(numpy_folder, 0o777)",
        "os.chmod('link', 0o4755)",
        "os.utime(numpy_file)",
        "os.utime('link', (0, 0))",
        "os.utime(numpy_folder, (0, 0))",
        "os.fchmod(os.open(numpy_file, os.O_RDONLY), 0o777)",
        "os.utime(os.open(numpy_file, os.O_RDONLY), (0, 0))",
        "fcntl.flock(os.open(numpy_file, os.O_RDONLY), fcntl.LOCK_SH)",
        "fcntl.lockf(os.open(numpy_file, os.O_RDONLY), fcntl.LOCK_SH)",
        before="import fcntl" + BEFORE,
    ),
    tries(
        "what else is installed",
        "__import__('yaml')",
        "__import__('torch')",
        "__import__('pip')",
        "__import__('proximo')",
        "open(os.path.dirname(os.path.dirname(numpy_folder)) + '/bin/activate')",
        "open(os.path.dirname(numpy_folder) + '/yaml/__init__.py')",
        before=BEFORE,
    ),
    says(
        "nothing else is there",
        "print(sorted(os.listdir('/packages')))",
        "['numpy', 'numpy.libs']\n",
        needs="names",
    ),
)


@pytest.fixture(scope="module", params=MACHINES, ids=str)
def sandbox(whole_sandbox: None, request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """With numpy."""
    with Sandbox(packages=["numpy"], **MACHINES[request.param]) as made:
        yield made


def test_a_package_does_its_work(sandbox) -> None:
    source = "import numpy\nprint(numpy.linalg.inv(numpy.eye(2) * 2).sum(), numpy.fft.fft([1, 1]).real, numpy.sum([2]))"
    outcome = sandbox.run(Program(source=source))
    assert outcome.stdout == b"1.0 [2. 0.] 2\n", outcome.stderr


@pytest.mark.parametrize("case", ATTACKS, ids=lambda case: case.name)
def test_a_package_is_all_that_is_there_and_nobody_can_change_it(sandbox, case: Case) -> None:
    if case.needs and sandbox.mechanisms.namespaces is not None:
        pytest.skip(f"needs {case.needs}")
    assert case.problems(sandbox.run(Program(source=case.source, limits=case.limits))) == []


SEARCH = """
# what this program says itself
import gc, sys
seen, frame = [], sys._getframe()
while frame:
    seen += [*map(str, frame.f_globals.values()), *map(str, frame.f_locals.values())]
    frame = frame.f_back
for each in gc.get_objects():
    seen += map(str, each.values()) if type(each) is dict else each if type(each) is list else []
seen = [each for each in seen if isinstance(each, str) and "what this program says itself" not in each]
print(len(seen) > 100, [each for each in seen if any(path in each for path in PATHS)])
"""


@pytest.mark.usefixtures("whole_sandbox")
def test_where_packages_were_found_and_folders_are_made_is_nowhere_to_be_read(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    paths = [os.path.dirname(find_packages(["numpy"])["numpy"]), str(tmp_path)]
    with Sandbox(packages=["numpy"]) as made:
        outcome = made.run(Program(source=SEARCH.replace("PATHS", repr(paths))))
    assert outcome.stdout == b"True []\n", (outcome.stdout[:500], outcome.stderr)


def install(folder: Path, name: str, source: str, *, requires: tuple[str, ...] = ()) -> None:
    """A distribution of one package, as an installer leaves it."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(textwrap.dedent(source))
    notes = folder / f"{name}-1.0.dist-info"
    notes.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {each}" for each in requires)]
    (notes / "METADATA").write_text("\n".join(lines) + "\n")
    (notes / "RECORD").write_text(f"{name}/__init__.py,,\n{name}-1.0.dist-info/METADATA,,\n../../bin/{name},,\n")
    (notes / "top_level.txt").write_text(f"{name}\n")


def test_what_a_package_requires_is_found_with_it(tmp_path, monkeypatch) -> None:
    install(tmp_path, "made_first", "import made_second", requires=("made_second>=1", "made_third; extra == 'more'"))
    install(tmp_path, "made_second", "", requires=("not_installed; sys_platform == 'win32'", "made.first"))
    install(tmp_path, "made_third", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_packages(["made_first"])
    assert found == {name: str(tmp_path / name) for name in ("made_first", "made_second")}
    assert find_packages([]) == {}
    with pytest.raises(SandboxError, match="'made_frist'; did you mean 'made_first'"):
        find_packages(["made_frist"])


@pytest.mark.usefixtures("whole_sandbox")
def test_a_package_that_cannot_be_imported_is_found_at_the_start(tmp_path, monkeypatch) -> None:
    install(tmp_path, "made_broken", "import socket; socket.socket()")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SandboxError, match="package 'made_broken' cannot be imported in the sandbox: PermissionError"):
        Sandbox(packages=["made_broken"])
