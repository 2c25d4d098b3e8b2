"""The same figures for a terminal."""

import io
from pathlib import Path

from made_up_runs import sample, write_lines, write_ppo_run
from rich.console import Console

from proximo.metrics.report.run_summary import before_after
from proximo.metrics.report.tables import print_before_after, print_samples
from proximo.metrics.run_files import Run, read_run


def printed(show, *args, width: int = 100, **options) -> str:
    stream = io.StringIO()
    show(*args, console=Console(file=stream, width=width), **options)
    return stream.getvalue()


def test_held_out_figures_come_before_those_of_training():
    lines = (
        {"step": 0, "evaluation/score": 0.1},
        {"step": 1, "score/mean": 5.0, "kl/sequence": 0.5},
        {"step": 2, "score/mean": 6.0, "kl/sequence": 1.5, "evaluation/score": 0.9},
    )
    rows = {row.label: row for row in before_after(Run(name="run", lines=lines))}
    assert (rows["Score"].before, rows["Score"].after, rows["Score"].last_step) == (0.1, 0.9, 2)
    assert rows["Score"].verdict == "better"
    assert (rows["KL"].before, rows["KL"].after, rows["KL"].verdict) == (0.5, 1.5, "")
    assert "Gold score" not in rows


def test_training_figures_stand_in_for_a_single_evaluation_and_a_single_one_has_no_before():
    lines = ({"step": 1, "score/mean": 5.0, "evaluation/score": 1.0}, {"step": 2, "score/mean": 4.0})
    row = before_after(Run(name="run", lines=lines))[0]
    assert (row.name, row.verdict) == ("score/mean", "worse")
    row = before_after(Run(name="run", lines=({"step": 1, "score/mean": 5.0},)))[0]
    assert (row.before, row.after, row.verdict) == (None, 5.0, "")


def test_the_table_has_a_row_for_each_figure(tmp_path: Path):
    run = write_ppo_run(tmp_path / "run", num_steps=16)
    lines = printed(print_before_after, run).splitlines()
    row = next(line.split() for line in lines if "Gold" in line)
    assert row == ["Gold", "score", "0.44", "0.85", "+0.41", "score"]
    assert len(before_after(read_run(run))) == 6


def test_the_table_says_where_it_compares_other_prompts(tmp_path: Path):
    def printed_of(*lines: str) -> str:
        (tmp_path / "metrics.jsonl").write_text("".join(f"{{{line}}}\n" for line in lines))
        return " ".join(printed(print_before_after, tmp_path).split())

    told = printed_of('"step": 1, "score/mean": 5, "kl/sequence": 0', '"step": 2, "score/mean": 4, "kl/sequence": 1')
    assert "Score, KL: from the first and the last training step" in told
    assert "data.held_out_rows" in told
    held_out = '"evaluation/score": 1, "evaluation/kl": 1'
    assert "training step" not in printed_of(f'"step": 0, {held_out}', f'"step": 2, "score/mean": 4, {held_out}')


def test_samples_are_printed_as_they_are_and_no_answer_steers_the_terminal(tmp_path: Path):
    assert printed(print_before_after, tmp_path) == printed(print_samples, tmp_path) == ""
    records = [sample(0, 0, response="[red]old[/red]"), sample(7, 0, response="[/nonsense] new")]
    write_lines(tmp_path / "samples.jsonl", records)
    text = printed(print_samples, tmp_path, width=140)
    assert [word for word in ("[red]old[/red]", "[/nonsense] new", "gold 0.85") if word not in text] == []
    steering = sample(0, 0, response="\x1b[2Jgone\r\nnext")
    write_lines(tmp_path / "samples.jsonl", [steering, *(sample(0, index) for index in range(1, 9))])
    text = printed(print_samples, tmp_path, width=140)
    assert "\x1b" not in text
    assert [word for word in ("[2Jgone", "next", "item 1", "item 2") if word not in text] == []
    assert "item 3" not in text
