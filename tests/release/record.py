"""What `make release-check` saw pass, and the page of supported versions made from it.

`python tests/release/record.py > docs/versions.md` writes the page.
"""

import json
import re
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PASSED = Path(__file__).with_name("passed.json")
SHOWN = ("torch", "transformers", "tokenizers", "peft", "datasets", "pydantic", "numpy")
BEFORE = """\
# Versions that were run

`make release-check` installs the wheel in a new environment for each Python, once with the lowest versions that
`pyproject.toml` allows and that have a wheel, once with the newest ones. There, without a compiler and without a
network, it runs `proximo doctor` and a pipeline, kills the pipeline, resumes it to the same bits, and runs tests of
every layer of the code. The column "demo" says where `proximo pipeline demo` ran too. These combinations passed, on
Linux and a CPU (x86-64):
"""
AFTER = """
Skipped are tests of the kernels in C, which need a compiler, and of real data. What stands between two rows is likely
to work, and was not run. Other systems and processors were not run at all.

A newer Python needs newer versions of some, since older ones have no wheel for it.
[CONTRIBUTING.md](../CONTRIBUTING.md) says when a lower bound or a Python is dropped. The lowest versions are:
"""
WORDS = {"lowest-direct": "lowest", "highest": "newest"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One combination that passed."""

    python: str
    """Such as 3.11.7."""
    resolution: str
    """A key of WORDS."""
    versions: dict[str, str]
    """Of each dependency in pyproject.toml, as installed."""
    demo: bool
    """The embedded example ran too."""
    passed: int
    skipped: int
    """Counts of tests."""
    day: str
    """YYYY-MM-DD."""

    @property
    def minor(self) -> str:
        """Such as 3.11, as in a classifier."""
        return ".".join(self.python.split(".")[:2])

    @property
    def text(self) -> str:
        shown = ", ".join(f"{name} {self.versions[name]}" for name in SHOWN[:2])
        return f"Python {self.python}, {WORDS[self.resolution]} versions, {shown}: {self.passed} tests"

    @property
    def key(self) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        """A later row with this key replaces an earlier one. Sorts by Python, then lowest first, then torch."""
        return numbers(self.minor), list(WORDS).index(self.resolution), numbers(self.versions["torch"])[:2]


def numbers(version: str) -> tuple[int, ...]:
    """The release of a version: (2, 13, 0) of 2.13.0+cpu."""
    return tuple(int(part) for part in re.match(r"[\d.]*\d", version)[0].split("."))


def requirements(project: Mapping[str, Any]) -> dict[str, str]:
    """Name -> lowest version of each dependency, from the values of pyproject.toml. Names are normalised."""
    parts = (line.partition(">=") for line in project["project"]["dependencies"])
    return {re.sub(r"[-_.]+", "-", name).lower(): bound.split(",")[0] for name, _, bound in parts}


def rows() -> list[Row]:
    """All that passed, in the order of the page."""
    return sorted((Row(**row) for row in json.loads(PASSED.read_text(encoding="utf-8"))), key=lambda row: row.key)


def add(new: Iterable[Row]) -> None:
    """Record these rows; each replaces an earlier one with the same Python, resolution and torch."""
    known = {row.key: row for row in (rows() if PASSED.exists() else [])} | {row.key: row for row in new}
    listed = [asdict(known[key]) for key in sorted(known)]
    PASSED.write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")


def page() -> str:
    """The text of docs/versions.md."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    lines = [
        BEFORE,
        f"| Python | dependencies | {' | '.join(SHOWN)} | tests passed | skipped | demo | day |",
        f"|---|---|{'---|' * len(SHOWN)}---|---|---|---|",
    ]
    for row in rows():
        versions = " | ".join(row.versions[name] for name in SHOWN)
        tests = f"{row.passed} | {row.skipped} | {'ran' if row.demo else ''}"
        lines.append(f"| {row.python} | {WORDS[row.resolution]} | {versions} | {tests} | {row.day} |")
    bounds = ", ".join(f"{name} {bound}" for name, bound in requirements(project).items())
    lines += [AFTER, *textwrap.wrap(f"{bounds}.", width=120)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
