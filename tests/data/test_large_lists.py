"""Data larger than memory: what lies on disk is what would lie in memory, and training on it has the same bits."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import tiny_tokenizer
from proximo.data import large_lists
from proximo.data.examples import ExampleOptions, TextExample, load_text_examples
from proximo.data.labelled import LabelledOptions, load_labelled_responses
from proximo.data.large_lists import OnDisk, collected, portions
from proximo.data.preferences import PairOptions, load_preference_pairs
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.readers.reading import load_rows
from proximo.data.readers.source import DataSource
from proximo.data.rows import Row
from proximo.data.step_examples import StepOptions, load_step_examples
from proximo.data.token_cache import TokenCache
from proximo.errors import DataError
from run_outcomes import assert_same_outcome, outcome
from tiny_runs import KINDS, RunOptions, changed, make_inputs, recipe_of, run

WORDS = ("abc", "da", "hgf", "e")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is larger than memory, and loads in portions of three."""
    monkeypatch.setattr(large_lists, "LARGEST_IN_MEMORY", 0)
    monkeypatch.setattr(large_lists, "PORTION_ITEMS", 3)


def rows(change: Callable[[int], dict[str, Any]] = lambda number: {}) -> list[Row]:
    """Equal ones among them, ties, long ones, and a character that the tokenizer cannot write."""
    made = []
    for number in range(20):
        prompt, answer = " ".join(WORDS[: number % 4 + 1]), WORDS[number % 3]
        values = {"prompt": prompt, "response": answer, "chosen": answer, "rejected": WORDS[number % 5 % 4]}
        values |= {"answer": "é" if number == 7 else "a", "base_scores": [0.1 * number]} | change(number)
        made.append(Row(source="made", number=number + 1, values=values, name="made"))
    return made


def texts() -> list[Row]:
    return [
        Row(source="made", number=n, values={"text": WORDS[n % 4] * (n % 3 + 1)}, name="made") for n in range(1, 24)
    ]


def solutions() -> list[Row]:
    """Right and wrong steps, some too many, and some with the separator inside."""
    made = []
    for n in range(1, 24):
        steps = [*WORDS[: n % 3 + 1], *(["a\nb"] if n % 5 == 0 else [])]
        values = {"prompt": WORDS[n % 4], "steps": steps, "labels": [n % 2 == 0] * len(steps)}
        made.append(Row(source="made", number=n, values=values, name="made"))
    return made


LOADS: dict[str, Callable[[], Any]] = {
    "texts": lambda: load_text_examples(rows(), tiny_tokenizer(), ExampleOptions(max_tokens=12)),
    "blocks": lambda: load_text_examples(texts(), tiny_tokenizer(), ExampleOptions(max_tokens=5, layout="blocks")),
    "pairs": lambda: load_preference_pairs(rows(), tiny_tokenizer(), PairOptions(max_tokens=16, too_long="truncate")),
    "labelled": lambda: load_labelled_responses(
        rows(lambda number: {"label": number % 3 == 0}), tiny_tokenizer(), LabelledOptions(max_tokens=12)
    ),
    "steps": lambda: load_step_examples(solutions(), tiny_tokenizer(), StepOptions(max_tokens=11, too_long="truncate")),
    "prompts": lambda: load_prompts(rows(), tiny_tokenizer(), PromptOptions(max_tokens=9, as_messages=False)),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_what_is_loaded_in_portions_to_disk_is_what_memory_would_hold(load, monkeypatch) -> None:
    in_memory, report = load()
    assert isinstance(in_memory, list)
    assert len(in_memory) > 6
    monkeypatch.setattr(large_lists, "LARGEST_IN_MEMORY", 0)
    monkeypatch.setattr(large_lists, "PORTION_ITEMS", 3)
    on_disk, report_in_portions = load()
    assert isinstance(on_disk, OnDisk)
    assert list(on_disk) == in_memory
    assert on_disk[-1] == in_memory[-1]
    assert on_disk[2:7:2] == in_memory[2:7:2]
    assert report_in_portions == report
    with pytest.raises(IndexError):
        on_disk[len(in_memory)]


@pytest.mark.parametrize(
    "kind", [kind if kind == "ppo" else pytest.param(kind, marks=pytest.mark.soak) for kind in KINDS]
)
def test_a_run_on_data_that_lie_on_disk_has_the_same_bits(kind, tmp_path, monkeypatch, no_report) -> None:
    place = make_inputs(tmp_path)
    run(kind, recipe_of(kind, place), RunOptions(quiet=True))
    expected = outcome(place / "run")
    monkeypatch.setattr(large_lists, "LARGEST_IN_MEMORY", 0)
    monkeypatch.setattr(large_lists, "PORTION_ITEMS", 5)
    run(kind, changed(recipe_of(kind, place), {}), RunOptions(quiet=True, overwrite=True))
    assert_same_outcome(place / "run", expected, after="data on disk")


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proximo.run.journal.write_report", lambda folder: folder / "report.html")


@pytest.mark.usefixtures("small")
def test_values_that_no_file_could_give_back_stay_as_they_are() -> None:
    """Arrays, numbers of numpy and objects are not turned into bytes."""
    odd = [np.float64(0.5), np.array([1, 2]), np.str_("a"), object(), {1: [b"a", (None, True)]}, -1.5, "\ud800"]
    made = [Row(source="made", number=number, values={"odd": value}) for number, value in enumerate(odd)]
    read = collected(made)
    assert isinstance(read, OnDisk)
    for before, after in zip(made, read, strict=True):
        assert type(after.values["odd"]) is type(before.values["odd"])
    assert read[0].values["odd"] is odd[0]
    assert [row.values for row in read[3:]] == [row.values for row in made[3:]]


def test_a_row_that_is_nested_too_deeply_to_be_written_stays_in_memory(tmp_path: Path) -> None:
    cell = "[" * 800 + "]" * 800
    (tmp_path / "deep.jsonl").write_text("".join(f'{{"n": {number}, "deep": {cell}}}\n' for number in range(3)))
    rows = load_rows([DataSource(path=str(tmp_path / "deep.jsonl"))]).rows
    assert [row.values["n"] for row in rows] == [0, 1, 2]


def test_portions_end_where_their_items_are_many_or_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_lists, "PORTION_ITEMS", 3)
    monkeypatch.setattr(large_lists, "PORTION_SIZE", 10)
    assert list(portions([1, 2, 3, 4, 9, 1, 11, 1], lambda size: size)) == [[1, 2, 3], [4, 9], [1, 11], [1]]


@pytest.mark.usefixtures("small")
def test_sources_are_mixed_and_columns_mapped_on_disk(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"ask": "a{n}"}}\n' for n in range(10)))
    (tmp_path / "b.csv").write_text("prompt\n" + "".join(f"b{n}\n" for n in range(10)))
    sources = [
        DataSource(path=str(tmp_path / "a.jsonl"), columns={"prompt": "ask"}, weight=1.0),
        DataSource(path=str(tmp_path / "b.csv"), weight=0.5),
    ]
    found = load_rows(sources, seed=3)
    assert isinstance(found.rows, OnDisk)
    assert [row.values["prompt"] for row in found.rows][:10] == [f"a{n}" for n in range(10)]
    assert found.description.endswith("b.csv: 5 of 10 rows")
    assert found.rows[12].origin.startswith(str(tmp_path / "b.csv"))


@pytest.mark.usefixtures("small")
def test_mistakes_are_named_as_in_memory(tmp_path: Path) -> None:
    twice = rows(lambda number: {"id": "same" if number in (2, 17) else f"row {number}"})
    with pytest.raises(DataError, match="made, row 18: id 'same' is already that of made, row 3"):
        load_prompts(collected(twice), tiny_tokenizer(), PromptOptions())
    with pytest.raises(DataError, match="row 12"):
        load_prompts(rows(lambda number: {"prompt": 3} if number == 11 else {}), tiny_tokenizer(), PromptOptions())
    with pytest.raises(DataError, match="no example is left: 0 of 20 rows kept, 20 too long"):
        load_text_examples(rows(), tiny_tokenizer(), ExampleOptions(max_tokens=2))


@pytest.mark.usefixtures("small")
def test_a_full_disk_is_an_error_that_names_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: open("/dev/full", "r+b"))  # noqa: SIM115
    with pytest.raises(DataError, match=f"{tmp_path} has no room.*TMPDIR"):
        collected(rows())


@pytest.mark.usefixtures("small")
def test_nothing_is_left_and_no_file_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = len(os.listdir("/dev/fd"))
    kept = collected(rows())
    assert isinstance(kept, OnDisk)
    assert len(os.listdir("/dev/fd")) == before + 1
    assert not list(tmp_path.iterdir())
    assert kept[0] == rows()[0]
    del kept
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.usefixtures("small")
def test_portions_are_cached_and_told_in_one_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proximo.data.token_cache.MIN_TEXTS", 2)
    first = load_prompts(rows(), tiny_tokenizer(), PromptOptions(), cache=TokenCache(tmp_path))[0]
    cache = TokenCache(tmp_path)
    again = load_prompts(rows(), tiny_tokenizer(), PromptOptions(), cache=cache)[0]
    assert list(first) == list(again)
    (note,) = cache.notes
    assert "texts read from" in note
    assert "files in" in note


def test_records_on_disk_are_not_in_memory() -> None:
    import pyarrow

    example = TextExample(id="a", token_ids=tuple(range(100)), loss_mask=(True,) * 100)
    before = pyarrow.total_allocated_bytes()
    kept = OnDisk(example for _ in range(1000))
    assert len(kept) == 1000
    assert not kept._others
    assert pyarrow.total_allocated_bytes() - before < 10_000
