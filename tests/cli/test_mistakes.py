"""Every mistake of the table: exit status 2, one message, no traceback, nothing written, and torch left alone."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mistakes import MISTAKES, Mistake
from written_files import write_files

from proximo.cli import main

TESTS = Path(__file__).parents[1]
ALL_IN_ONE_PROCESS = """
import sys, tempfile
from pathlib import Path
from mistakes import MISTAKES
from test_mistakes import check_mistake

for mistake in MISTAKES:
    with tempfile.TemporaryDirectory() as folder:
        check_mistake(mistake, Path(folder))
    heavy = {"torch", "transformers", "datasets"} & sys.modules.keys()
    assert not heavy, (mistake.name, heavy)
print("torch was never needed")
"""


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_mistake(mistake: Mistake, folder: Path) -> None:
    """Make it in an empty folder, and look at what was said and left."""
    write_files(folder, mistake.files)
    before, begun = contents(folder), Path.cwd()
    said, printed = io.StringIO(), io.StringIO()
    os.chdir(folder)
    sys.stdin = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
            status = main(list(mistake.argv))
    finally:
        os.chdir(begun)
        sys.stdin = sys.__stdin__
    text = said.getvalue()
    assert (status, printed.getvalue()) == (2, ""), (mistake.name, status, printed.getvalue(), text)
    assert text.removeprefix("loading matplotlib\n").startswith("error: "), (mistake.name, text)
    assert text.count("error: ") == 1, (mistake.name, text)
    assert "Traceback" not in text, (mistake.name, text)
    for piece in mistake.pieces:
        assert piece in text, (mistake.name, piece, text)
    assert contents(folder) == before, mistake.name


def test_mistakes_get_one_message_before_torch_is_imported_and_change_nothing() -> None:
    script = f"import sys; sys.path[:0] = {[str(TESTS), str(TESTS / 'cli')]!r}\n{ALL_IN_ONE_PROCESS}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stdout) == (0, "torch was never needed\n"), done.stderr


def test_there_are_many_rows_with_names_of_their_own() -> None:
    assert len(MISTAKES) >= 60
    names = [mistake.name for mistake in MISTAKES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("mistake", [MISTAKES[0], MISTAKES[-1]], ids=lambda mistake: mistake.name)
def test_a_real_process_says_the_same(mistake: Mistake, tmp_path: Path) -> None:
    write_files(tmp_path, mistake.files)
    command = [str(Path(sys.executable).with_name("proximo")), *mistake.argv]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert all(piece in done.stderr for piece in mistake.pieces)
    assert contents(tmp_path).keys() == {Path(name) for name in mistake.files}
