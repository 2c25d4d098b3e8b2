"""docs/refused.md says what the conflicts say, and no validator is missing from it."""

import re
from pathlib import Path

import pytest

from docs.refusals import conflicts, page, reasons_of, rows

PAGE = Path(__file__).parents[2] / "docs" / "refused.md"


def test_each_combination_is_refused():
    assert not [row for row in rows() if not reasons_of(*row)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            "reward=[{kind: think_answer, verifier: {kind: code, form: asserts}}]",
            r"answer_seconds \(10\) must be above 26",
        ),
        ("ppo.policy_loss.rejection={kind: ratio, upper: 2}", "log-probs are the same, and every weight 1"),
        ("engine={kind: vllm, addresses: ['https://host:8000'], token_env: 'my-token'}", "never the token itself"),
    ],
)
def test_a_combination_is_refused_for_a_reason_that_another_row_has(changes: str, reason: str) -> None:
    (said,) = reasons_of("ppo", changes)
    assert re.search(reason, said)


def test_the_page_is_what_the_conflicts_say():
    assert PAGE.read_text(encoding="utf-8") == page(), "PYTHONPATH=tests python -m docs.refusals > docs/refused.md"


def test_no_conflict_is_missing():
    said = "\n".join(reason for row in rows() for reason in reasons_of(*row))
    missing = [f"{file}:{line}: {piece}" for file, line, piece in conflicts() if piece not in said]
    assert not missing
