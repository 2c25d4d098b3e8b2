"""Every malformed input gets one DataError that says where, what came and what to do; nothing is read past it."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from builders import tiny_tokenizer
from proximo.data.examples import ExampleOptions, load_text_examples
from proximo.data.preferences import PairOptions, load_preference_pairs
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.readers.reading import load_rows
from proximo.data.readers.source import DataSource
from proximo.errors import DataError, UserError


def jsonl(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "yo"}

READING: dict[str, Any] = {
    # what is wrong: (file, content, the pieces of the message, options of the source)
    "empty file": ("a.jsonl", b"", "a.jsonl | empty (0 bytes)"),
    "empty array": ("a.json", b"[]", "a.json | no rows"),
    "header without rows": ("a.csv", b"prompt,answer\n", "a.csv | no rows"),
    "cut-off last line": ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "b', "a.jsonl, row 2 | cut off"),
    "broken line in the middle": ("a.jsonl", b'{"p": 1}\n{"p" 2}\n{"p": 3}\n', "row 2 | ':' delimiter | column 6"),
    "two objects in a line": ("a.jsonl", b'{"p": 1} {"p": 2}\n', "row 1 | one object per line"),
    "row is a list": ("a.jsonl", b'{"p": 1}\n[1, 2]\n', "row 2 | must be an object | list"),
    "array read as lines": ("a.jsonl", b'[{"p": 1}]', "row 1 | format: json", {"format": "jsonl"}),
    "cut-off array": ("a.json", b'[{"p": 1}, {"p": 2}', "a.json | after row 2 | copied or downloaded whole"),
    "array with a missing comma": ("a.json", b'[{"p": 1} {"p": 2}]', "after row 1 | comma"),
    "text after the array": ("a.json", b'[{"p": 1}] extra', "after the end of the array | extra"),
    "infinite number": ("a.jsonl", b'{"p": 1}\n{"p": 1e999}\n', "row 2 | 1e999 is too large for 64 bits"),
    "NaN": ("a.jsonl", b'{"p": 1}\n{"p": NaN}\n', "row 2 | NaN is not a JSON value | null"),
    "a key twice": ("a.jsonl", b'{"p": 1, "p": 2}\n', "row 1 | 'p' appears twice"),
    "nested without end": ("a.jsonl", b'{"p": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "row 1 | too deeply"),
    "a number of 5000 digits": (
        "a.jsonl",
        b'{"p": ' + b"1" * 5000 + b"}",
        "row 1: Exceeds the limit | 5000 digits",
    ),
    "not UTF-8": ("a.jsonl", b'{"p": "a"}\n{"p": "caf\xe9"}\n', "a.jsonl, row 2 | byte 11 | 0xe9 | UTF-8"),
    "UTF-16": ("a.jsonl", '{"p": "a"}'.encode("utf-16"), "a.jsonl | UTF-16 | UTF-8"),
    "UTF-16 without a mark": ("a.csv", "p\na\n".encode("utf-16-le"), "a.csv, line 1 | NUL | UTF-16"),
    "gzip by its ending": ("a.jsonl.gz", gzip.compress(b"{}"), "a.jsonl.gz | gzip | unpack"),
    "gzip": ("a.jsonl", gzip.compress(b"{}"), "a.jsonl | gzip | unpack"),
    "Parquet under a wrong name": ("a.jsonl", b"PAR1....", "a.jsonl | Parquet | format: parquet"),
    "Git LFS pointer": ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS | git lfs pull"),
    "too few cells": ("a.csv", b"p,q\n1,2\n3\n", "a.csv, row 2 (line 3) | 1 cells | 2 columns | p, q"),
    "too many cells": ("a.csv", b"p,q\n1,2,3\n", "row 1 (line 2) | 3 cells | 2 columns | quotes"),
    "open quote": ("a.csv", b'p,q\n1,"2\n3,4\n', "a.csv, line 3 | never closed"),
    "lone carriage returns": (
        "a.csv",
        b"p,q\ra,1\r",
        "a.csv, line 1 | not valid CSV | save the file with line ends of \\n",
    ),
    "a column twice": ("a.csv", b"p,q,p\n1,2,3\n", "a.csv | 'p' twice"),
    "cut-off Parquet": ("a.parquet", b"PAR1abc", "a.parquet | not a whole Parquet file"),
    "no separator line": ("a.txt", b"one\ntwo\n", "a.txt | <|end|>", {"separator": "<|end|>"}),
    "unknown ending": ("a.dat", b"x", "a.dat | '.dat' | format | jsonl"),
    "missing column": (
        "a.jsonl",
        jsonl({"question": "a"}),
        "a.jsonl, row 1 | 'questoin' | 'prompt' | columns found: 'question' | nearest: 'question'",
        {"columns": {"prompt": "questoin"}},
    ),
    "missing column in a text": (
        "a.jsonl",
        jsonl({"q": "a"}),
        "row 1 | no column 'qq' | {{ and }}",
        {"columns": {"prompt": "Q: {qq}"}},
    ),
    "null in a text": ("a.jsonl", jsonl({"q": None}), "row 1 | 'q' is null", {"columns": {"prompt": "Q: {q}"}}),
}


@pytest.mark.parametrize("case", READING)
def test_a_malformed_file_is_refused_with_its_row(tmp_path: Path, case: str) -> None:
    name, content, told, *options = READING[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_rows([DataSource(path=str(tmp_path / name), **dict(*options))])
    assert_says(caught.value, told)


CONTENTS: dict[str, Any] = {
    "no prompt": (
        "prompts",
        [{"promt": "a"}],
        "row 1 | no column 'prompt' | 'promt' | nearest: 'promt' | prompt: <column>",
    ),
    "only text": ("prompts", [{"text": "a"}], "row 1 | prompt: text"),
    "number as prompt": ("prompts", [{"prompt": "a"}, {"prompt": 5}], "row 2 | 'prompt' | 5 (int)"),
    "list of numbers as prompt": (
        "prompts",
        [{"prompt": "a"}, {"prompt": [1]}],
        "row 2 | message 1 | role and content",
    ),
    "empty prompt": ("prompts", [{"prompt": ""}], "row 1 | prompt is empty | BOS"),
    "no messages": ("prompts", [{"messages": []}], "row 1 | list of messages | a list of 0"),
    "unknown role": (
        "prompts",
        [{"messages": [USER, {"role": "developer", "content": "5"}]}],
        "message 2 | system, user, assistant, tool | 'developer'",
    ),
    "null content": ("prompts", [{"messages": [{"role": "user", "content": None}]}], "message 1 | must be text | null"),
    "only the assistant": ("prompts", [{"messages": [ASSISTANT]}], "row 1 | no prompt"),
    "answer is a list": ("prompts", [{"prompt": "a", "answer": [1]}], "row 1 | 'answer' | a list of 1 | metadata"),
    "id twice": ("prompts", [{"id": 7, "prompt": "a"}, {"id": 7, "prompt": "b"}], "row 2 | id '7' | row 1"),
    "half a surrogate": ("prompts", [{"prompt": "a\ud83d"}], "row 1 | surrogate | \\ud83d"),
    "neither text nor prompt": (
        "texts",
        [{"completion": "a"}],
        "row 1 | wanted text, or prompt and response | 'completion'",
    ),
    "response of a later row missing": (
        "texts",
        [{"prompt": "a", "response": "b"}, {"prompt": "a"}],
        "row 2 | no column 'response'",
    ),
    "no turn of the assistant": ("texts", [{"messages": [USER]}], "row 1 | no turn of the assistant"),
    "begins with the assistant": ("texts", [{"messages": [ASSISTANT]}], "row 1 | must begin"),
    "no rejected": ("pairs", [{"prompt": "a", "chosen": "b", "reject": "c"}], "row 1 | 'rejected' | nearest: 'reject'"),
    "a true value as output": (
        "pairs",
        [{"prompt": "a", "output_1": True, "output_2": "b", "label": 1}],
        "row 1 | 'output_1' | True | takes it as text",
    ),
    "label of 3": (
        "pairs",
        [{"prompt": "a", "output_1": "b", "output_2": "c", "label": 3}],
        "row 1 | 'label' | 1 or 2 | 3 (int)",
    ),
    "margin is a word": ("pairs", [{**PAIR, "margin": "big"}], "row 1 | 'margin' | 'big'"),
    "transcripts that share nothing": (
        "pairs",
        [{"chosen": "Human: a", "rejected": "Human: b"}],
        "row 1 | Assistant: | in a separate column",
    ),
    "texts that share nothing": (
        "pairs",
        [{"chosen": "ab c", "rejected": "abd c"}],
        "row 1 | no beginning in common | in a separate column",
    ),
    "conversations that share nothing": (
        "pairs",
        [{"chosen": [USER, ASSISTANT], "rejected": [{**USER, "content": "x"}, ASSISTANT]}],
        "row 1 | share no turns",
    ),
    "prompt ends with the assistant": (
        "pairs",
        [{"prompt": [USER, ASSISTANT], "chosen": [ASSISTANT], "rejected": [ASSISTANT]}],
        "row 1 | must end with a turn",
    ),
    "all pairs identical": ("pairs", [{**PAIR, "rejected": "b"}], "no pair is left | 1 identical pair dropped"),
}


@pytest.mark.parametrize("case", CONTENTS)
def test_a_malformed_row_is_refused_with_its_place(tmp_path: Path, case: str) -> None:
    kind, rows, told = CONTENTS[case]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(jsonl(*rows))
    with pytest.raises(DataError) as caught:
        load(kind, load_rows([DataSource(path=str(file))]).rows)
    assert_says(caught.value, told)


def test_a_wrong_number_in_a_parquet_column_is_refused_with_its_row(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [PAIR | {"margin": 1.0}, PAIR | {"margin": float("nan")}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(DataError) as caught:
        load("pairs", load_rows([DataSource(path=str(tmp_path / "a.parquet"))]).rows)
    assert_says(caught.value, "a.parquet, row 2 | 'margin' | nan")


PLACES: dict[str, Any] = {
    "missing file": ({"path": "reviews.jsonl"}, "reviews.jsonl: no such file | nearest: 'review.jsonl'"),
    "missing absolute path": ({"path": "/nowhere/at/all"}, "/nowhere/at/all: no such file"),
    "folder as a file": ({"path": "folder", "format": "jsonl"}, "folder | a folder | jsonl"),
    "folder of something": ({"path": "folder"}, "folder | save_to_disk | inside.txt"),
    "folder to load from disk": ({"path": "folder", "format": "disk"}, "folder | save_to_disk"),
    "unreachable Hub": ({"path": "someone/something"}, "someone/something | Hub | train"),
    "unknown module": ({"path": "no_such_module_here:rows"}, "cannot import 'no_such_module_here' | PYTHONPATH"),
    "unknown function": (
        {"path": "proximo.recipes.pairing:label_pair"},
        "no function 'label_pair' | nearest: 'label_pairs'",
    ),
    "wrong argument": (
        {"path": "proximo.recipes.pairing:label_pairs", "kwargs": {"file": "x"}},
        "label_pairs | path | file",
    ),
    "not a generator": ({"path": "os:getpid"}, "os:getpid | must yield rows | int"),
    "rows are not mappings": (
        {"path": "string:capwords", "kwargs": {"s": "ab"}},
        "string:capwords, row 1 | mapping | 'A'",
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_a_source_that_is_not_there_is_refused_with_its_name(tmp_path: Path, monkeypatch, case: str) -> None:
    options, told = PLACES[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "review.jsonl").write_bytes(jsonl(PAIR))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inside.txt").write_text("x")
    with pytest.raises(UserError) as caught:
        load_rows([DataSource(**options)])
    assert_says(caught.value, told)


USER_FAULTS = {
    "after a row": ("def rows():\n    yield {'prompt': 'a'}\n    1 / 0\n", "line 3) after row 1"),
    "before any": ("def rows():\n    return open('nowhere.txt')\n", "line 2) before its first row"),
    "within a library": ("import json\ndef rows():\n    yield json.loads('{')\n", "line 3) before its first row"),
    "as it is imported": ("x = {}['key']\ndef rows():\n    yield {}\n", "cannot import"),
    "one mapping": ("def rows():\n    return {'prompt': ['a']}\n", "must yield rows, it returned dict"),
}


@pytest.mark.parametrize("fault", USER_FAULTS)
def test_what_a_user_function_raises_is_told_with_its_place(fault: str, tmp_path: Path, monkeypatch) -> None:
    code, told = USER_FAULTS[fault]
    module = f"rows_that_fail_{fault.replace(' ', '_')}"
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError) as caught:
        load_rows([DataSource(path=f"{module}:rows")])
    assert_says(caught.value, f"{module}:rows | {told}" + ("" if "returned" in told else f" | {module}.py, line"))


def load(kind: str, rows) -> None:
    tokenizer = tiny_tokenizer()
    match kind:
        case "prompts":
            load_prompts(rows, tokenizer, PromptOptions())
        case "texts":
            load_text_examples(rows, tokenizer, ExampleOptions())
        case "pairs":
            load_preference_pairs(rows, tokenizer, PairOptions())


def assert_says(error: Exception, told: str) -> None:
    """`told`: pieces of the message, parted by ` | `."""
    message = str(error)
    missing = [piece for piece in told.split(" | ") if piece not in message]
    assert not missing, f"{missing} not in: {message}"
    assert "\n" not in message
