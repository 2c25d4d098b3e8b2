"""Real answers of models, graded as those who labelled them did; where not, the table says who is right."""

import json
from collections import Counter

import pytest
from maths_verifiers import maths_verifier

from proximo_verifiers.maths.equivalence import candidate_parses, equivalent
from proximo_verifiers.verifier import Answer
from real_data import real_data

DIFFERENCES = {
    # The label takes 10{,}000 for another number than 10000. They are the same: the grade here is right.
    ("10{,}000", "10000"): 1.0,
}


def rows(*parts: str) -> list[dict]:
    return [json.loads(line) for line in real_data(*parts).read_text().splitlines()]


def test_all_labelled_solutions_of_gsm8k_are_graded_as_labelled() -> None:
    verifier = maths_verifier(answer_from=["label"])
    found = rows("gsm8k", "labelled_solutions_dev.jsonl")
    assert len(found) == 1320
    for row in found:
        grade = verifier.grade(Answer(text=row["solution"], prompt=row["question"], reference=row["gold"]))
        assert (grade.score == 1.0) is row["is_correct"], row
        assert grade.components["undecided"] == 0.0


def test_labelled_latex_answers_are_graded_as_labelled_but_for_those_in_the_table() -> None:
    verifier = maths_verifier()
    found = rows("math", "math_cot_labelled_dev.jsonl")
    assert len(found) == 400
    differences = Counter()
    for row in found:
        grade = verifier.grade(Answer(text=row["response"], prompt=row["question"], reference=row["gold"]))
        assert grade.components == {"parsed": 1.0, "by_symbols": 0.0, "undecided": 0.0}, row
        if (grade.score == 1.0) is not row["score"]:
            differences[row["gold"], row["pred"]] += 1
            assert DIFFERENCES[row["gold"], row["pred"]] == grade.score
    assert differences == Counter(dict.fromkeys(DIFFERENCES, 1))


def test_the_answers_of_math_500_equal_themselves_and_the_boxes_of_their_solutions() -> None:
    verifier = maths_verifier()
    found = rows("math", "math500_dev.jsonl")
    assert len(found) == 250
    for row in found:
        verifier.check_row(row["answer"], {})
        assert equivalent(row["answer"], row["answer"]) is True
        solution = verifier.grade(Answer(text=row["solution"], prompt=row["problem"], reference=row["answer"]))
        assert solution.score == 1.0, row["answer"]
    words = [row["answer"] for row in found if not candidate_parses(row["answer"], percent=True).values]
    assert words == ["\\text{east}", "\\text{ellipse}"]


@pytest.mark.parametrize("offset", [1, 7, 50])
def test_the_answer_to_another_problem_is_right_only_where_it_is_the_same(offset: int) -> None:
    found = [row["answer"] for row in rows("math", "math500_dev.jsonl")]
    for one, other in zip(found, found[offset:] + found[:offset], strict=True):
        plain = {each.replace(" ", "").replace("^\\circ", "") for each in (one, other)}
        assert (equivalent(one, other) is True) is (len(plain) == 1), (one, other)
