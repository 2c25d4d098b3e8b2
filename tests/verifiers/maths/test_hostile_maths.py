"""Answers made to hang, crash, fool or take over the verifier get the grade they deserve, within a second."""

import os
import random
import string
import time
from pathlib import Path

import pytest
from hostile_answers import HOSTILE
from maths_verifiers import countdown_verifier, maths_verifier

from proximo_verifiers.maths.symbols import is_installed
from proximo_verifiers.verifier import Answer, ScoreState

PLACES = ["boxed", "hash", "phrase", "label", "response"]
INSTALLED = pytest.mark.skipif(not is_installed(), reason="the extra maths is not installed")
CASES = [pytest.param(*row[1:], "never", id=row[0]) for row in HOSTILE]
CASES += [
    pytest.param(*row[1:], "always", id=f"{row[0]}, with sympy", marks=INSTALLED)
    for row in HOSTILE
    if len(row[2]) < 1000
]
"""Longer ones sympy never sees."""
CPU_SECONDS = 0.8
"""The limit of the verifier. Its timer fires again where a library swallowed its exception, as a callback does."""


def test_there_are_enough_of_them() -> None:
    assert len(HOSTILE) >= 100
    assert len({name for name, *_ in HOSTILE}) == len(HOSTILE)


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("reference", "text", "right", "symbolic"), CASES)
def test_a_hostile_answer_gets_its_grade_in_time(
    *, reference: str, text: str, right: bool, symbolic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    verifier = maths_verifier(symbolic=symbolic, answer_from=PLACES)
    if symbolic == "always":
        verifier.grade(Answer(text="\\boxed{\\cos x}", prompt="", reference="\\sin x"))  # loads sympy
    environment = dict(os.environ)
    start = time.process_time()
    grade = verifier.grade(Answer(text=text, prompt="", reference=reference))
    assert time.process_time() - start <= 2 * CPU_SECONDS
    assert grade.score == float(right)
    assert grade.state in (ScoreState.SCORED, ScoreState.MODEL_FAULT)
    assert len(grade.reason or "") < 200
    assert dict(os.environ) == environment
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", [row[2] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_countdown_survives_them_too(text: str) -> None:
    verifier = countdown_verifier(answer_from=["tags", "boxed", "response"])
    start = time.process_time()
    grade = verifier.grade(Answer(text=text, prompt="", metadata={"nums": [3, 7], "target": 21}))
    assert time.process_time() - start <= 1.0
    assert grade.score == 0.0


def test_random_texts_never_leave_the_verifier_as_an_exception() -> None:
    draw = random.Random(3)
    pieces = [*"()[]{}^_+-*/=,.%!&$\\'\"<>|:; \n", *string.digits[:4], *string.ascii_letters[:6]]
    pieces += ["\\frac", "\\sqrt", "\\pm", "\\cup", "\\infty", "\\{", "\\}", "\\\\", "\\text{", "\\binom", "\\left("]
    pieces += ["\\begin{pmatrix}", "\\end{pmatrix}", "\\overline{", "\\pi", "and", "i", "10^", "1,000", "\u221e", "\0"]
    verifier = maths_verifier(answer_from=["response"])
    for _ in range(1500):
        text = "".join(draw.choice(pieces) for _ in range(draw.randrange(1, 30)))
        for reference in ("5", "(1,2]", "x^2+1"):
            grade = verifier.grade(Answer(text=text, prompt="", reference=reference))
            assert grade.score in (0.0, 1.0)
            verifier.grade(Answer(text="5", prompt="", reference=text.strip() or "5"))
