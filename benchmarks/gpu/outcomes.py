"""A section is run within its limit, and what came of it is written down at once, to be read by people and programs."""

import json
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu.bench import SMOKE_SECONDS, Bench, CannotRun, TooLong

Section = Callable[[Bench], dict[str, Any]]
LEAST_SECONDS = 8
"""With less of the budget left no section begins."""
SHOWN_CHARACTERS = 1500
"""Of one value in the text."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one section."""

    status: str
    """`ok`, `failed` or `skipped`."""
    seconds: float = 0.0
    reason: str = ""
    """Why it was skipped, or its traceback."""
    wrong: list[str] = field(default_factory=list)
    """What should hold and does not."""
    skipped: list[str] = field(default_factory=list)
    """Parts that were left out, with the reasons."""
    found: dict[str, Any] = field(default_factory=dict)


def run_section(section: Section, bench: Bench, *, limit_seconds: float) -> Outcome:
    """Whatever it raises is its outcome."""
    if bench.left() < LEAST_SECONDS:
        return Outcome(status="skipped", reason="the budget is used up")
    bench.wrong, bench.skipped = [], []
    begin, found, reason, status = time.time(), {}, "", "ok"
    limit = SMOKE_SECONDS if bench.smoke else min(limit_seconds, bench.left())
    bench.section_end = begin + limit
    try:
        with cut_after(limit):
            found = section(bench)
    except CannotRun as skip:
        status, reason = "skipped", str(skip)
    except (Exception, SystemExit, TooLong):
        status, reason = "failed", traceback.format_exc()[-2500:]
    if bench.wrong:
        status = "failed"
    return Outcome(
        status=status,
        seconds=round(time.time() - begin, 1),
        reason=reason,
        wrong=bench.wrong,
        skipped=bench.skipped,
        found=found,
    )


@contextmanager
def cut_after(seconds: float) -> Iterator[None]:
    """Raises TooLong in what runs inside."""

    def ring(*_: Any) -> None:
        raise TooLong(f"cut at its limit of {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(0.1, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def save(outcomes: Mapping[str, Outcome], folder: Path) -> None:
    """`gpu.json` has everything, `gpu.txt` the same to read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps({k: asdict(v) for k, v in outcomes.items()}, indent=1, default=str))
    (folder / "gpu.txt").write_text(as_text(outcomes))


def as_text(outcomes: Mapping[str, Outcome]) -> str:
    """One block for each section; the last lines name what failed and what was skipped."""
    lines = []
    for name, outcome in outcomes.items():
        lines.append(f"== {name}: {outcome.status} in {outcome.seconds} s")
        lines += [f"  wrong: {said}" for said in outcome.wrong] + [f"  skipped: {said}" for said in outcome.skipped]
        lines += [outcome.reason] if outcome.reason else []
        for key, value in outcome.found.items():
            lines += _rows(key, value)
    return "\n".join([*lines, summary(outcomes)]) + "\n"


def summary(outcomes: Mapping[str, Outcome]) -> str:
    """Counts, and the names of all that failed or was skipped."""
    by_status = {
        status: [name for name, outcome in outcomes.items() if outcome.status == status]
        for status in ("ok", "failed", "skipped")
    }
    skipped = [f"{name} ({outcomes[name].reason})" for name in by_status["skipped"]]
    skipped += [f"{name}: {part}" for name, outcome in outcomes.items() for part in outcome.skipped]
    return (
        f"ok: {', '.join(by_status['ok']) or 'none'}\n"
        f"failed: {', '.join(by_status['failed']) or 'none'}\n"
        f"skipped: {'; '.join(skipped) or 'none'}"
    )


def _rows(key: str, value: Any) -> list[str]:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        rows = ["    " + "  ".join(f"{name}={_short(each)}" for name, each in row.items()) for row in value]
        return [f"  {key}:", *rows]
    return [f"  {key}: {_short(value)}"]


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_short(each)}" for name, each in value.items()) + "}"
    text = str(value).rstrip()
    return text if len(text) <= SHOWN_CHARACTERS else "... " + text[-SHOWN_CHARACTERS:]
