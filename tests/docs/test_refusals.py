"""docs/refused.md says what the validators say, and no validator is missing from it."""

from pathlib import Path

from docs.refusals import page, reasons_of, rows, validators

PAGE = Path(__file__).parents[2] / "docs" / "refused.md"


def test_each_combination_is_refused():
    assert not [row for row in rows() if not reasons_of(*row)]


def test_the_page_is_what_the_validators_say():
    assert PAGE.read_text(encoding="utf-8") == page(), "PYTHONPATH=tests python -m docs.refusals > docs/refused.md"


def test_no_validator_is_missing():
    said = "\n".join(reason for row in rows() for reason in reasons_of(*row))
    missing = [f"{file}:{line}: {piece}" for file, line, piece in validators() if piece not in said]
    assert not missing
