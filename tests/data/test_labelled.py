"""Rows to labelled responses: the forms, what a label may be, and what is refused or counted."""

from typing import Any

import pytest

from builders import tiny_tokenizer
from proximo.data.labelled import LabelledOptions, LabelledResponse, load_labelled_responses
from proximo.data.load_report import LoadReport
from proximo.data.rows import Row
from proximo.errors import DataError


def loaded(rows: list[dict[str, Any]], **options: Any) -> tuple[list[LabelledResponse], LoadReport]:
    made = [Row(source="rows.jsonl", number=number, values=values) for number, values in enumerate(rows, start=1)]
    return load_labelled_responses(made, tiny_tokenizer(), LabelledOptions(**{"max_tokens": 64} | options))


def texts(found: list[LabelledResponse]) -> list[tuple[str, str, str, bool]]:
    decode = tiny_tokenizer().decode
    return [
        (
            row.id,
            decode(row.prompt_token_ids, skip_special_tokens=True),
            decode(row.response_token_ids, skip_special_tokens=True),
            row.desirable,
        )
        for row in found
    ]


PAIR = {"prompt": "ab", "chosen": "cd", "rejected": "ef"}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (
            [
                {"prompt": "ab", "response": "cd", "label": True},
                {"prompt": "a", "response": "c", "label": False, "id": 7},
            ],
            [("rows.jsonl-1", "ab", "cd", True), ("7", "a", "c", False)],
        ),
        ([{"prompt": "ab", "completion": "cd", "label": False}], [("rows.jsonl-1", "ab", "cd", False)]),
        (
            [PAIR, PAIR | {"id": "x"}],
            [
                ("rows.jsonl-1/chosen", "ab", "cd", True),
                ("rows.jsonl-1/rejected", "ab", "ef", False),
                ("x/chosen", "ab", "cd", True),
                ("x/rejected", "ab", "ef", False),
            ],
        ),
        (
            [{"instruction": "ab", "output_1": "cd", "output_2": "ef", "label": vote} for vote in (2, 0)],
            [("rows.jsonl-1/chosen", "ab", "ef", True), ("rows.jsonl-1/rejected", "ab", "cd", False)],
        ),
    ],
)
def test_every_form_is_seen_from_its_columns(rows: list[dict[str, Any]], expected: list[tuple[str, ...]]) -> None:
    assert texts(loaded(rows)[0]) == expected


@pytest.mark.parametrize(
    ("label", "desirable"),
    [(False, False), ("true", True), (" False ", False), (1, True), ("0", False)],
)
def test_a_label_is_true_or_false_however_a_file_writes_it(label: Any, desirable: bool) -> None:
    (found,), _ = loaded([{"prompt": "ab", "response": "cd", "label": label}])
    assert found.desirable is desirable


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, r"row 2: no column 'label'; columns found: 'prompt', 'response'.*`columns: {label: <column>}`"),
        ({"label": "good"}, r"row 2: column 'label' must be true or false, got the text 'good'"),
        ({"label": 5}, r"row 2: column 'label' must be true or false, got 5 \(int\)"),
    ],
)
def test_a_label_that_is_none_is_refused_with_its_row(row: dict[str, Any], message: str) -> None:
    good = {"prompt": "ab", "response": "cd", "label": True}
    with pytest.raises(DataError, match=message):
        loaded([good, {"prompt": "ab", "response": "cd", **row}])


def test_a_text_without_a_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="no column 'prompt', only 'text'"):
        loaded([{"text": "ab", "label": True}])


def test_a_pair_may_be_read_as_the_labelled_response_that_it_holds_too() -> None:
    row = PAIR | {"response": "gh", "label": False}
    assert [each.desirable for each in loaded([row])[0]] == [True, False]
    assert texts(loaded([row], form="prompt_response")[0]) == [("rows.jsonl-1", "ab", "gh", False)]


def test_equal_prompts_with_equal_responses_are_duplicates() -> None:
    rows = [{"prompt": "ab", "response": response, "label": True} for response in ("cd", "ef", "cd")]
    assert loaded(rows)[1].num_duplicates == 1


def test_what_became_of_the_rows_is_counted_with_a_pair_as_two() -> None:
    tie = {"instruction": "ab", "output_1": "cd", "output_2": "ef", "label": 0}
    long = {"instruction": "ab", "output_1": "cd" * 20, "output_2": "ef", "label": 2}
    found, report = loaded([tie, long], max_tokens=12)
    assert [row.id for row in found] == ["rows.jsonl-2/chosen"]
    assert (report.num_rows, report.num_kept_rows, report.num_ties, report.num_too_long) == (3, 1, 1, 1)
    assert report.num_tokens == found[0].num_tokens
    with pytest.raises(DataError, match=r"no response is left: 0 of 3 rows kept.*max_tokens 2"):
        loaded([tie, long], max_tokens=2)
