"""`proximo report` of several runs, and where its pages go."""

import json
from pathlib import Path

import pytest

from proximo import RunFolderError, SavedRun, UserError, compare
from proximo.checkpoint.run_folder import open_run
from proximo.cli import main
from proximo.commands import report

pytestmark = pytest.mark.usefixtures("folder")


def write_run(path: str, *losses: float, trainer: str = "sft", seed: int = 1) -> Path:
    folder = Path(path)
    with open_run(folder):
        lines = [{"step": step, f"{trainer}/loss": loss} for step, loss in enumerate(losses, 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "config.resolved.json").write_text(json.dumps({"run": {"folder": path, "seed": seed}}))
    return folder


def test_several_runs_become_one_page_here_or_where_it_is_wanted(capsys) -> None:
    write_run("runs/a", 3.0, 2.0)
    write_run("runs/b", 3.0, 1.0, seed=2)
    before = {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}
    assert main(["report", "runs/a", "runs/b"]) == 0
    assert capsys.readouterr().out == "comparison.html\n"
    page = Path("comparison.html").read_text()
    assert "<h1>a and b</h1>" in page
    assert "<code>run.seed</code>" in page
    assert main(["report", "runs/a", "runs/b", "--out", "runs/ab.html"]) == 0
    assert capsys.readouterr().out == "runs/ab.html\n"
    assert Path("runs/ab.html").read_text() == page
    assert main(["report", "runs/a", "--out", "a.html"]) == 0
    assert "<h1>a</h1>" in Path("a.html").read_text()
    Path("runs/ab.html").unlink()
    assert {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()} == before


def test_a_page_replaces_a_page_and_nothing_else(capsys) -> None:
    runs = [str(write_run(f"runs/{name}", 2.0, 1.0)) for name in "ab"]
    for _ in range(2):
        assert main(["report", *runs]) == 0
    Path("mine.html").write_text("<!DOCTYPE html>\n<html>my own notes</html>")
    for given in (runs, runs[:1]):
        assert main(["report", *given, "--out", "mine.html"]) == 2
        assert "mine.html is not a page of Proximo and is left as it is" in capsys.readouterr().err
    assert "my own notes" in Path("mine.html").read_text()
    assert list(Path().glob("*.partial")) == []


def test_runs_of_one_name_are_told_apart_by_the_folders_above(capsys) -> None:
    one, other = write_run("one/ppo", 1.0, 9.0, 1.0, 9.0, 1.0, 9.0), write_run("other/ppo", 2.0)
    assert main(["report", str(one), str(other)]) == 0
    assert "<h1>one/ppo and other/ppo</h1>" in Path("comparison.html").read_text()


def test_pipelines_are_compared_stage_by_stage_and_alarms_name_run_and_stage(capsys) -> None:
    write_run("x/sft", 1.0, 1.0, 1.0, 4.0, 4.0, 4.0)
    write_run("y/sft", 3.0, 2.0)
    write_run("y/reward", 0.7, trainer="reward_model")
    (Path("y") / "ppo").mkdir()
    write_run("z", 2.5)
    assert main(["report", "x", "y", "z"]) == 0
    page = Path("comparison.html").read_text()
    assert page.count('<section class="stage"') == 1
    assert "<h2>Supervised fine-tuning</h2>" in page
    assert capsys.readouterr().err.startswith("loading matplotlib\nx/sft: problem: The training loss jumped.")
    write_run("only/reward", 0.7, trainer="reward_model")
    with pytest.raises(RunFolderError, match="no stage in common"):
        compare(["only", "x"])


def test_what_cannot_be_compared_is_one_sentence_and_writes_nothing() -> None:
    runs = [write_run(f"runs/{number}", 2.0) for number in range(10)]
    empty = write_run("runs/empty")
    unknown = write_run("runs/unknown", 1.0, trainer="future")
    Path("other").mkdir()
    for given, words in (
        (runs, "2 to 9 runs, one colour for each, got 10"),
        (runs[:1], "got 1"),
        (runs[0], r"got one: write \['"),
        ([runs[0], "runs/../runs/0"], "runs/0 is given twice"),
        ([runs[0], empty], "runs/empty has no line yet"),
        ([runs[0], unknown], "runs/unknown has recorded no metric"),
        ([runs[0], "other"], "other holds no run"),
        ([runs[0], "nowhere"], "there is no run folder nowhere"),
    ):
        with pytest.raises(UserError, match=words):
            compare(given)
    with pytest.raises(UserError, match="other is a folder: give a file"):
        compare(runs[:2], "other")
    with pytest.raises(UserError, match="there is no folder no to write x.html to"):
        compare(runs[:2], "no/x.html")
    assert not list(Path().glob("*.html"))


def test_saved_runs_are_compared_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [SavedRun(write_run(f"runs/{name}", 2.0, 1.0)) for name in "ab"]
    given = []
    monkeypatch.setattr(report, "comparison_page", lambda groups: given.append(groups) or "the page")
    assert compare([*runs, write_run("runs/c", 3.0)], Path("page.html")) == Path("page.html")
    assert Path("page.html").read_text() == "the page"
    assert [[each.label for each in group] for group in given[0]] == [["a", "b", "c"]]
