"""Every mistake of the table: exit status 2, one message, no traceback, nothing written, and torch left alone."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from mistakes import MISTAKES, Mistake
from written_files import write_files

from proximo.cli import main

TESTS = Path(__file__).parents[1]
ALL_IN_ONE_PROCESS = """
import contextlib, io, os, sys, tempfile
from mistakes import MISTAKES
from written_files import write_files
from proximo.cli import main

for mistake in (each for each in MISTAKES if each.before_torch):
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()) as said:
        write_files(folder, mistake.files)
        os.chdir(folder)
        sys.stdin = io.StringIO()
        status = main(list(mistake.argv))
    heavy = {"torch", "transformers", "datasets"} & sys.modules.keys()
    assert status == 2 and not heavy, (mistake.name, status, heavy, said.getvalue())
print("torch was never needed")
"""


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_gets_one_message_and_changes_nothing(mistake: Mistake, tmp_path, monkeypatch, capsys):
    write_files(tmp_path, mistake.files)
    before = contents(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main(list(mistake.argv)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.removeprefix("loading matplotlib\n").startswith("error: ")
    assert said.err.count("error: ") == 1
    assert "Traceback" not in said.err
    for piece in mistake.pieces:
        assert piece in said.err
    assert contents(tmp_path) == before


def test_there_are_many_rows_with_names_of_their_own():
    assert len(MISTAKES) >= 60
    names = [mistake.name for mistake in MISTAKES]
    assert len(set(names)) == len(names)


def test_mistakes_of_recipes_and_command_lines_are_found_before_torch_is_imported():
    script = f"import sys; sys.path[:0] = {[str(TESTS), str(TESTS / 'cli')]!r}\n{ALL_IN_ONE_PROCESS}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stdout) == (0, "torch was never needed\n"), done.stderr


@pytest.mark.parametrize("mistake", [MISTAKES[0], MISTAKES[-1]], ids=lambda mistake: mistake.name)
def test_a_real_process_says_the_same(mistake: Mistake, tmp_path):
    write_files(tmp_path, mistake.files)
    command = [str(Path(sys.executable).with_name("proximo")), *mistake.argv]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert all(piece in done.stderr for piece in mistake.pieces)
    assert contents(tmp_path).keys() == {Path(name) for name in mistake.files}
