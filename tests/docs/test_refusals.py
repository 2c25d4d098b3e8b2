"""docs/refused.md says what the validators say, and no validator is missing from it."""

from pathlib import Path

from docs.refusals import ROWS, page, reasons_of, refusals, validators

PAGE = Path(__file__).parents[2] / "docs" / "refused.md"


def test_each_combination_is_refused():
    assert not [(kind, changes) for kind, _, changes in ROWS if not reasons_of(kind, changes)]


def test_the_page_is_what_the_validators_say():
    assert PAGE.read_text(encoding="utf-8") == page(), "PYTHONPATH=tests python -m docs.refusals > docs/refused.md"


def test_no_validator_is_missing():
    said = "\n".join(reason for row in refusals() for reason in row.reasons)
    missing = [f"{file}:{line}: {piece}" for file, line, piece in validators() if piece not in said]
    assert not missing
