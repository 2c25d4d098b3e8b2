"""What is said of supported versions was seen to pass: the page, the classifiers and the lower bounds follow."""

import dataclasses
import json
import tomllib

import pytest
import record
from record import Row, numbers

with (record.ROOT / "pyproject.toml").open("rb") as file:
    PROJECT = tomllib.load(file)
LOWEST = PROJECT["project"]["requires-python"].removeprefix(">=")


def made_row(**changes) -> Row:
    return dataclasses.replace(
        Row(
            python="3.12.1",
            resolution="highest",
            versions=dict.fromkeys(record.SHOWN, "9.9"),
            demo=False,
            passed=5,
            skipped=1,
            day="2026-11-25",
        ),
        **changes,
    )


def test_the_page_says_what_passed() -> None:
    message = "python tests/release/record.py > docs/versions.md writes it"
    assert (record.ROOT / "docs" / "versions.md").read_text(encoding="utf-8") == record.page(), message


def test_a_classifier_names_each_python_that_passed_and_no_other() -> None:
    start = "Programming Language :: Python :: 3."
    named = {line for line in PROJECT["project"]["classifiers"] if line.startswith(start)}
    assert named == {f"Programming Language :: Python :: {row.minor}" for row in record.rows()}
    assert f"Programming Language :: Python :: {LOWEST}" in named


def test_no_lower_bound_is_below_what_passed_on_the_lowest_python() -> None:
    (lowest,) = (row for row in record.rows() if row.minor == LOWEST and row.resolution == "lowest-direct")
    bounds = record.requirements(PROJECT)
    known = bounds.keys() & lowest.versions.keys()
    assert "torch" in known
    below = {
        name: (bounds[name], lowest.versions[name])
        for name in known
        if padded(bounds[name]) < padded(lowest.versions[name])
    }
    assert not below, f"bounds and what was run (make release-check RELEASE_OPTIONS=--record): {below}"


def padded(version: str) -> tuple[int, ...]:
    """2.13 and 2.13.0 are the same."""
    return (*numbers(version), 0, 0, 0)[:4]


def test_a_later_pass_replaces_that_of_the_same_python_and_torch(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(record, "PASSED", tmp_path / "passed.json")
    newer = dict.fromkeys(record.SHOWN, "10.1")
    record.add([made_row(passed=1), made_row(python="3.9.2"), made_row(versions=newer)])
    record.add([made_row(python="3.12.4", passed=2), made_row(resolution="lowest-direct")])
    found = [(row.python, row.resolution, row.passed, row.versions["torch"]) for row in record.rows()]
    assert found == [
        ("3.9.2", "highest", 5, "9.9"),
        ("3.12.1", "lowest-direct", 5, "9.9"),
        ("3.12.4", "highest", 2, "9.9"),
        ("3.12.1", "highest", 5, "10.1"),
    ]
    assert len(json.loads(record.PASSED.read_text(encoding="utf-8"))) == 4


@pytest.mark.parametrize(("version", "found"), [("2.13.0+cpu", (2, 13, 0)), ("6.0", (6, 0)), ("2.0rc1", (2, 0))])
def test_the_numbers_of_a_version(version, found) -> None:
    assert numbers(version) == found


def test_the_names_of_requirements_are_those_of_installed_packages() -> None:
    project = {"project": {"dependencies": ["huggingface_hub>=1.31", "math.verify>=0.9,<0.10"]}}
    assert record.requirements(project) == {"huggingface-hub": "1.31", "math-verify": "0.9"}
