"""A grader as a user makes one: of a class or a path, with its limits, and what is refused."""

import json
from pathlib import Path

import pytest

import proximo_verifiers
from example_verifiers import Letters
from proximo_verifiers import Answer, CodeVerifier, ConfigError, DataError, Grader, MathsVerifier, ScoreState, Verifier


class Limited(Verifier):
    """Says which limit it was told, and counts the rows that it checks."""

    answer_seconds = 45.0

    def __init__(self, answer_seconds: float, checked: str | None = None) -> None:
        self.told, self.checked = answer_seconds, checked

    def grade(self, answer: Answer) -> proximo_verifiers.Grade:
        return proximo_verifiers.Grade(score=self.told)

    def check_row(self, reference: str | None, metadata: object) -> None:
        if self.checked is not None:
            with Path(self.checked).open("a") as lines:
                lines.write(f"{reference}\n")


def test_a_class_and_its_path_are_the_same_verifier() -> None:
    answers = [Answer(text="aab"), Answer(text="b")]
    with Grader(Letters, num_workers=1) as of_class, Grader("example_verifiers:Letters", num_workers=1) as of_path:
        assert of_class.name == of_path.name == "Letters"
        assert of_class.grade(answers) == of_path.grade(answers)
        assert of_class.grade([]) == []


def test_a_verifier_with_a_limit_is_told_the_one_that_holds() -> None:
    for answer_seconds, told in ((None, 45.0), (20.0, 20.0)):
        with Grader(Limited, num_workers=1, answer_seconds=answer_seconds) as grader:
            assert grader.grade([Answer(text="")])[0].score == told
            assert grader._pool._answer_seconds == told
    assert CodeVerifier.answer_seconds == 120.0


def test_a_row_is_checked_once(tmp_path: Path) -> None:
    checked = tmp_path / "checked"
    rows = [Answer(text="", reference=reference) for reference in ("x", "y", "x")]
    with Grader(Limited, {"checked": str(checked)}, num_workers=1) as grader:
        grader.check_rows(rows)
        grader.check_rows([*rows, Answer(text="other", reference="z")])
    assert checked.read_text().split() == ["x", "y", "z"]


def test_a_row_that_is_refused_is_refused_again() -> None:
    with Grader(Letters, num_workers=1) as grader:
        for _ in range(2):
            with pytest.raises(DataError, match=r"^row 7: reward source 'Letters': there is nothing to grade by"):
                grader.check_rows([Answer(text="", metadata={"unfit": True})], names=["row 7"])


def test_a_class_that_a_worker_cannot_import_is_refused() -> None:
    class Local(Letters):
        pass

    with pytest.raises(ConfigError, match=r"cannot import .*Local, which is defined in a function: write it into a"):
        Grader(Local)
    scripted = type("Scripted", (Letters,), {"__module__": "__main__", "__qualname__": "Scripted"})
    with pytest.raises(ConfigError, match="defined in a script or notebook"):
        Grader(scripted)


@pytest.mark.parametrize(
    ("verifier", "options", "message"),
    [
        (MathsVerifier, {"answer_from": ["bxed"]}, "answer_from has no 'bxed'; did you mean 'boxed'?"),
        (MathsVerifier, {"multiple_answers": "all"}, "multiple_answers cannot be 'all'; there are: last, first, agree"),
        (MathsVerifier, {"symbolic": "allways"}, "symbolic cannot be 'allways'; did you mean 'always'?"),
        (MathsVerifier, {"tolerance": 0.1}, "got an unexpected keyword argument 'tolerance'"),
        ("proximo_verifiers:CountdownVerifier", {"operators": ["**"]}, "operators cannot have '**'"),
        (CodeVerifier, {"form": "assert"}, "form cannot be 'assert'; did you mean 'asserts'?"),
        (CodeVerifier, {"form": "asserts", "program": "last"}, "program cannot be 'last'"),
    ],
)
def test_an_option_that_is_not_known_is_refused_before_anything_is_graded(
    verifier: type | str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Grader(verifier, options, num_workers=1)
    assert message in str(caught.value)


def test_a_failed_answer_is_no_zero_and_leaves_the_others_alone() -> None:
    with Grader("example_verifiers:Hostile", num_workers=1, attempts=1) as grader:
        before, failed, after = grader.grade([Answer(text="a"), Answer(text="die"), Answer(text="ab")])
        counts = grader.take_counts()
    assert (before.score, after.score) == (1.0, 2.0)
    assert (failed.state, failed.state.has_score) == (ScoreState.INFRASTRUCTURE_FAULT, False)
    assert (counts.num_responses, counts.num_failures, counts.num_restarts) == (3, 1, 1)


def test_the_public_names_are_there_and_no_other_is() -> None:
    found = {name: getattr(proximo_verifiers, name) for name in proximo_verifiers.__all__}
    homes = {name for names in proximo_verifiers._HOMES.values() for name in names}
    assert homes == set(found)
    assert all(getattr(each, "__module__", "").startswith("proximo_verifiers") for each in found.values())
    with pytest.raises(AttributeError, match=r"no public name 'Grade_'; it has Answer, CodeVerifier"):
        proximo_verifiers.Grade_  # noqa: B018


def test_a_grade_says_what_a_verifier_was_handed() -> None:
    with Grader("example_verifiers:Everything", num_workers=1) as grader:
        (grade,) = grader.grade([Answer(text="t", prompt=({"role": "user", "content": "c"},), metadata={"n": 1})])
    assert json.loads(grade.reason or "") == ["t", [{"role": "user", "content": "c"}], None, {"n": 1}, "eos", 0]
