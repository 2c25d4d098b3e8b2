"""The same rows come out of every format, each with its place; columns, limits, phases and mixtures apply to all."""

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proximo.data.formats.messages import messages_cell
from proximo.data.order import DataPhase
from proximo.data.readers import reading
from proximo.data.readers.reading import load_rows, mixture_counts, read_source
from proximo.data.readers.source import DataSource
from proximo.data.readers.text_files import file_lines
from proximo.data.rows import fingerprints, row_ids
from proximo.errors import DataError

ROWS = [
    {"prompt": "one", "answer": "1"},
    {"prompt": "two, with a comma", "answer": "2"},
    {"prompt": 'three "quoted"\nin two lines \u2028 \x85', "answer": "drei \u00fc"},
]


def write_rows(path: Path, rows: list[dict] = ROWS) -> Path:
    match path.suffix:
        case ".json":
            path.write_text(json.dumps(rows, indent=2))
        case ".jsonl" | ".ndjson":
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8", newline="\n")
        case ".csv" | ".tsv":
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
                writer.writeheader()
                writer.writerows(rows)
        case ".parquet":
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("ending", ["json", "jsonl", "ndjson", "csv", "tsv", "parquet"])
def test_every_file_format_gives_the_same_rows(tmp_path: Path, ending: str) -> None:
    rows = read_source(DataSource(path=str(write_rows(tmp_path / f"rows.{ending}"))))
    assert [dict(row.values) for row in rows] == ROWS
    assert [row.number for row in rows] == [1, 2, 3]
    assert rows[1].origin.startswith(f"{tmp_path}/rows.{ending}, row 2")


def test_a_row_of_a_table_names_the_line_where_it_ends(tmp_path: Path) -> None:
    rows = read_source(DataSource(path=str(write_rows(tmp_path / "rows.csv", [ROWS[2], ROWS[0]]))))
    # \u2028 and \x85 do not end a line; the newline in the quotes does.
    assert [row.origin.split(", ", 1)[1] for row in rows] == ["row 1 (line 3)", "row 2 (line 4)"]


def test_a_folder_of_save_to_disk_gives_its_rows(tmp_path: Path) -> None:
    import datasets

    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": dataset, "test": dataset.select([2])}).save_to_disk(tmp_path / "splits")
    assert [dict(row.values) for row in read_source(DataSource(path=str(tmp_path / "plain")))] == ROWS
    assert [dict(row.values) for row in read_source(DataSource(path=str(tmp_path / "splits")))] == ROWS
    assert len(read_source(DataSource(path=str(tmp_path / "splits"), split="test"))) == 1
    with pytest.raises(DataError, match=r"no split 'tset'; the folder has 'train', 'test'; nearest: 'test'"):
        read_source(DataSource(path=str(tmp_path / "splits"), split="tset"))


def test_a_hub_data_set_is_read_through_datasets(monkeypatch) -> None:
    import datasets

    asked = []

    def load_dataset(name, subset, *, split):
        asked.append((name, subset, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = read_source(DataSource(path="someone/questions", subset="main", split="test", max_rows=2))
    assert asked == [("someone/questions", "main", "test")]
    assert [row.origin for row in rows] == ["someone/questions, row 1", "someone/questions, row 2"]


def test_keys_that_a_table_adds_to_messages_are_left_out(tmp_path: Path) -> None:
    """Parquet gives every message the keys of all messages, with null where it had none."""
    turns = [{"role": "user", "content": "a", "name": "Bo"}, {"role": "user", "content": "b"}]
    row = read_source(DataSource(path=str(write_rows(tmp_path / "a.parquet", [{"prompt": turns}]))))[0]
    assert row.values["prompt"][1]["name"] is None
    assert messages_cell(row, "prompt") == tuple(turns)


def test_a_function_gives_what_it_yields(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "my_rows.py").write_text("def count(n):\n    for i in range(n):\n        yield {'prompt': str(i)}\n")
    monkeypatch.syspath_prepend(tmp_path)
    rows = read_source(DataSource(path="my_rows:count", kwargs={"n": 3}))
    assert [row.values["prompt"] for row in rows] == ["0", "1", "2"]
    assert rows[2].origin == "my_rows:count, row 3"


@pytest.mark.parametrize(
    ("content", "separator", "documents"),
    [
        ("a\nb\n<|end|>\nc\n<|end|>\n", "<|end|>", ["a\nb", "c"]),
        ("a\r\n<|end|>\r\n\r\nc", "<|end|>", ["a", "c"]),
        ("a <|end|> b\n  <|end|>  \nc", "<|end|>", ["a <|end|> b", "c"]),
        ("a\nb\n\n\nc\n \t\nd", None, ["a\nb", "c", "d"]),
        ("  \na\n \n\t\n  b\r\n\r\nc \n  ", None, ["a", "  b", "c "]),
        ("\n  a\n\nb\n", "", ["  a\n\nb"]),
    ],
)
def test_a_text_is_cut_into_documents(
    tmp_path: Path, content: str, separator: str | None, documents: list[str]
) -> None:
    (tmp_path / "a.txt").write_bytes(content.encode())
    rows = read_source(DataSource(path=str(tmp_path / "a.txt"), separator=separator))
    assert [row.values for row in rows] == [{"text": document} for document in documents]


def test_cells_keep_their_line_ends(tmp_path: Path) -> None:
    long = "x" * 200_000
    (tmp_path / "a.csv").write_bytes(f'p,q\r\n"a\r\nb\n\n",1\r\n\u2028,"\r"\n{long},2'.encode())
    limit = csv.field_size_limit(1000)
    rows = read_source(DataSource(path=str(tmp_path / "a.csv")))
    assert csv.field_size_limit(limit) == 1000, "the limit of others is put back"
    assert [tuple(row.values.values()) for row in rows] == [("a\r\nb\n\n", "1"), ("\u2028", "\r"), (long, "2")]
    assert [row.line for row in rows] == [5, 6, 7]


@pytest.mark.parametrize(
    ("name", "line"), [("a.csv", "some,cells\n"), ("a.txt", "a text\n\n"), ("a.jsonl", '{"p": 1}\n')]
)
def test_a_file_is_read_no_further_than_its_rows_are_asked_for(
    name: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So its whole text is never in memory."""
    (tmp_path / name).write_text(line * 50)
    given: list[str] = []

    def counted(*arguments: Any, **options: Any) -> Iterator[str]:
        for each in file_lines(*arguments, **options):
            given.append(each)
            yield each

    monkeypatch.setattr(reading, "file_lines", counted)
    assert len(read_source(DataSource(path=str(tmp_path / name), max_rows=5))) == 5
    assert len(given) < 15


def test_a_byte_order_mark_and_dos_line_ends_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"p": "a"}\r\n\r\n{"p": "b"}\r\n')
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfp,\r\na,1\r\n\r\nb,2\r\n")
    assert [(row.number, row.values["p"]) for row in read_source(DataSource(path=str(tmp_path / "a.jsonl")))] == [
        (1, "a"),
        (3, "b"),
    ]
    assert [row.values for row in read_source(DataSource(path=str(tmp_path / "a.csv")))] == [
        {"p": "a", "column 2": "1"},
        {"p": "b", "column 2": "2"},
    ]


def test_the_content_and_not_the_ending_says_whether_json_is_an_array(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"p": 1}\n{"p": 2}\n')
    (tmp_path / "b.jsonl").write_text(' \n[{"p": 1},\n{"p": 2}]')
    assert len(read_source(DataSource(path=str(tmp_path / "a.json")))) == 2
    assert len(read_source(DataSource(path=str(tmp_path / "b.jsonl")))) == 2


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"prompt": "q"}, {"prompt": "What?", "n": [3, 4], "x": 1.5, "id": "k"}),
        (
            {"prompt": "Use {n} for {x}: {q}"},
            {"prompt": "Use [3, 4] for 1.5: What?", "q": "What?", "n": [3, 4], "x": 1.5, "id": "k"},
        ),
        ({"prompt": "{{{q}}}"}, {"prompt": "{What?}", "q": "What?", "n": [3, 4], "x": 1.5, "id": "k"}),
        ({"prompt": "q", "answer": "q", "id": ""}, {"prompt": "What?", "answer": "What?", "n": [3, 4], "x": 1.5}),
        ({"x": "n", "n": "x"}, {"q": "What?", "x": [3, 4], "n": 1.5, "id": "k"}),
    ],
)
def test_columns_fill_fields(tmp_path: Path, columns, expected) -> None:
    write_rows(tmp_path / "a.jsonl", [{"q": "What?", "n": [3, 4], "x": 1.5, "id": "k"}])
    assert read_source(DataSource(path=str(tmp_path / "a.jsonl"), columns=columns))[0].values == expected


def test_a_placeholder_takes_nothing_but_a_column(tmp_path: Path) -> None:
    """Templates are filled from cells, not by str.format: no attribute of an object can be reached."""
    write_rows(tmp_path / "a.jsonl", [{"q": "{n}"}])
    row = read_source(DataSource(path=str(tmp_path / "a.jsonl"), columns={"prompt": "-{q}-"}))[0]
    assert row.values["prompt"] == "-{n}-"
    with pytest.raises(DataError, match=r"no column 'q.__class__'"):
        read_source(DataSource(path=str(tmp_path / "a.jsonl"), columns={"prompt": "{q.__class__}"}))


def numbered(tmp_path: Path, name: str, count: int) -> str:
    return str(write_rows(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{index}"} for index in range(count)]))


def test_sources_without_weights_give_all_their_rows_in_order(tmp_path: Path) -> None:
    loaded = load_rows([DataSource(path=numbered(tmp_path, "a", 3)), DataSource(path=numbered(tmp_path, "b", 2))])
    assert [row.values["prompt"] for row in loaded.rows] == ["a0", "a1", "a2", "b0", "b1"]
    assert loaded.description.endswith("b.jsonl: 2 of 2 rows")


def test_weights_are_shares_of_an_epoch_and_no_row_comes_twice(tmp_path: Path) -> None:
    sources = [
        DataSource(path=numbered(tmp_path, "a", 100), weight=3),
        DataSource(path=numbered(tmp_path, "b", 100), weight=1),
    ]
    rows = load_rows(sources, seed=5).rows
    names = [row.values["prompt"] for row in rows]
    assert Counter(name[0] for name in names) == {"a": 100, "b": 33}
    assert len(set(names)) == len(names)
    assert names[100:] != [f"b{index}" for index in range(33)]
    assert [row.number for row in rows[100:]] == sorted(row.number for row in rows[100:])
    assert names == [row.values["prompt"] for row in load_rows(sources, seed=5).rows]
    assert names != [row.values["prompt"] for row in load_rows(sources, seed=6).rows]


@pytest.mark.parametrize(
    ("available", "weights", "counts"),
    [
        ([100, 100], [3, 1], [100, 33]),
        ([10, 100], [1, 1], [10, 10]),
        ([10, 100, 7], [0.5, 0.25, 0.25], [10, 5, 5]),
        ([1000, 3], [1e-6, 1], [1, 3]),
    ],
)
def test_the_source_that_runs_out_first_gives_all_its_rows(available, weights, counts) -> None:
    assert mixture_counts(available, weights) == counts


def test_the_phase_is_taken_of_each_source_so_stages_share_no_row_whatever_they_add(tmp_path: Path) -> None:
    shared = DataSource(path=numbered(tmp_path, "a", 50))
    extra = DataSource(path=numbered(tmp_path, "b", 20))

    def prompts(sources, part):
        phase = DataPhase(proportions=(2, 4, 4), part=part)
        return {row.values["prompt"] for row in load_rows(sources, seed=part, phase=phase).rows}

    first, second, third = prompts([shared, extra], 0), prompts([shared], 1), prompts([extra, shared], 2)
    assert not first & second
    assert not second & third
    assert not first & third
    assert len(first | second | third) == 50 + 4 + 8


def test_a_source_that_is_whole_is_not_shared_between_the_phases(tmp_path: Path) -> None:
    """Texts for fine-tuning alone beside a set that all stages share."""
    shared, own = tmp_path / "shared.jsonl", tmp_path / "own.jsonl"
    for path in (shared, own):
        path.write_text("".join(json.dumps({"prompt": f"{path.stem} {n}"}) + "\n" for n in range(10)))
    sources = [DataSource(path=str(shared)), DataSource(path=str(own), whole=True)]
    rows = load_rows(sources, phase=DataPhase(proportions=(2, 4, 4), part=0)).rows
    found = [row.values["prompt"].split()[0] for row in rows]
    assert (found.count("shared"), found.count("own")) == (2, 10)


def test_max_rows_are_the_first_and_an_empty_phase_is_refused(tmp_path: Path) -> None:
    path = numbered(tmp_path, "a", 50)
    assert [row.number for row in load_rows([DataSource(path=path, max_rows=3)]).rows] == [1, 2, 3]
    with pytest.raises(DataError, match="part 1 of the proportions"):
        load_rows([DataSource(path=path, max_rows=1)], phase=DataPhase(proportions=(1, 1), part=1))


def test_ids_are_those_of_the_column_or_of_source_and_row(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"id": 5}, {"id": "x"}])
    (tmp_path / "deeper").mkdir()
    other = numbered(tmp_path / "deeper", "a", 2)
    rows = load_rows([DataSource(path=str(tmp_path / "a.jsonl")), DataSource(path=other), DataSource(path=other)]).rows
    assert row_ids(rows) == ["5", "x", "a~2-1", "a~2-2", "a~3-1", "a~3-2"]


def test_the_fingerprint_sees_cells_and_order_but_not_places(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl"), write_rows(tmp_path / "b.json"), write_rows(tmp_path / "c.jsonl", ROWS[::-1])
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.json", "c.jsonl")]
    together = fingerprints([row for path in paths for row in read_source(DataSource(path=path))])
    assert list(together) == paths
    assert together[paths[0]] == together[paths[1]] != together[paths[2]]
    assert together[paths[0]].startswith(f"{len(ROWS)} rows, sha256 ")
    assert fingerprints(read_source(DataSource(path=paths[2]))) == {paths[2]: together[paths[2]]}
