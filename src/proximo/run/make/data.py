"""Reads the data section of a recipe and splits its rows into training and held-out, before tokenisation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

from proximo.config.data import DataConfig, SourceConfig
from proximo.config.run import RunConfig
from proximo.config.schema.base import Section
from proximo.data.large_lists import collected
from proximo.data.load_report import LoadReport
from proximo.data.order import DataPhase, hold_out
from proximo.data.readers.reading import load_rows
from proximo.data.readers.source import DataSource
from proximo.data.rows import Row, fingerprints
from proximo.data.token_cache import TokenCache

Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRows:
    """Training rows and held-out rows, with fingerprints."""

    training: Sequence[Row]
    held_out: Sequence[Row]
    description: str
    """The number of rows from each source, as text."""
    bounded: str = ""
    """Why fewer rows are held out than `held_out_rows` asks for, as text to follow their number; else empty."""

    @property
    def fingerprints(self) -> dict[str, str]:
        """Source -> digest of its rows. Digests and settings determine which rows are held out."""
        return fingerprints(chain(self.training, self.held_out))


def read_split(data: DataConfig, *, seed: int) -> SplitRows:
    """Read the sources of a stage. Raises DataError for malformed rows."""
    phase = None
    if data.proportions is not None and data.phase is not None:
        phase = DataPhase(proportions=data.proportions, part=data.phase, seed=data.split_seed)
    found = load_rows(as_sources(data.sources), seed=seed, phase=phase)
    if data.evaluation_sources is not None:
        held_out = load_rows(as_sources(data.evaluation_sources), seed=seed).rows
        return SplitRows(training=found.rows, held_out=held_out, description=found.description)
    kept, held = hold_out(len(found.rows), data.held_out_rows, seed=seed)
    asked = f" (at most a fifth; held_out_rows asks for {data.held_out_rows:,})"
    bounded = "" if len(held) == data.held_out_rows else asked
    return SplitRows(
        training=collected(found.rows[i] for i in kept) if held else found.rows,
        held_out=collected(found.rows[i] for i in held),
        description=found.description + (f"; held out: {len(held):,}{bounded}" if bounded else ""),
        bounded=bounded,
    )


def evaluation_notes(data: DataConfig, report: LoadReport | None) -> tuple[str, ...]:
    """A line on the rows of `evaluation_sources`, if there are any."""
    return () if data.evaluation_sources is None or report is None else (f"evaluation rows: {report}",)


def token_cache(run: RunConfig) -> TokenCache:
    """The cache of token ids that the run uses, if any."""
    return TokenCache(None if run.token_cache is None else Path(run.token_cache).expanduser())


def options_of(kind: Callable[..., Options], section: Section, **others: Any) -> Options:
    """The options of a loader, a dataclass, from the keys of their names. `others`: fields that are no such key."""
    names = [field.name for field in fields(cast("Any", kind)) if field.name not in others]
    return kind(**{name: getattr(section, name) for name in names}, **others)


def as_sources(sources: Sequence[SourceConfig]) -> list[DataSource]:
    """The options of the reader."""
    return [
        options_of(
            DataSource,
            source,
            path=source.path or source.function,
            format="function" if source.function else source.format,
        )
        for source in sources
    ]
