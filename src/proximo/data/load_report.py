"""The report of a load: how many rows were kept, dropped or cut, and which columns were not used."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any, Literal

from proximo.message_text import count_of


@dataclass(frozen=True, order=True, slots=True)
class Remark:
    """A column of a source that was not used, or was read as something else."""

    source: str
    what: Literal["columns not used", "messages read from JSON text in"]
    column: str


def remark_lines(remarks: Mapping[Remark, int]) -> Iterator[str]:
    """One line for each source and kind of remark, with the number of rows of each column."""
    for (source, what), group in groupby(sorted(remarks), lambda remark: (remark.source, remark.what)):
        columns = _counted((f"'{remark.column}'", remarks[remark]) for remark in group)
        yield f"{source}: {what}: {columns}"


def unread_lines(unread: Mapping[str, int]) -> Iterator[str]:
    """A line on keys that the chat template ignores, with the number of rows of each; none if there are none."""
    if unread:
        yield f"not read by the chat template: {_counted(sorted(unread.items()))}"


def _counted(names: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name} ({count_of(count, 'row')})" for name, count in names)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """Counts of one load. `num_rows` is the sum of `num_kept_rows` and all dropped rows."""

    num_rows: int = 0
    """Rows before anything was dropped."""
    num_kept_rows: int = 0
    num_too_long: int = 0
    """Dropped: more tokens than allowed, and truncation was off or not enough."""
    num_truncated: int = 0
    """Kept, but cut to the limit of tokens."""
    num_duplicates: int = 0
    """Kept, although an earlier row has the same tokens."""
    num_identical_pairs: int = 0
    """Dropped: chosen and rejected are the same."""
    num_too_short: int = 0
    """Dropped: a response has fewer words than wanted."""
    num_ties: int = 0
    """Dropped: neither output was preferred."""
    num_without_targets: int = 0
    """Dropped: no token counts in the loss."""
    num_inseparable: int = 0
    """Dropped: a step contains the separator of steps, or shares its last token with another step."""
    num_empty_responses: int = 0
    """Kept: responses without text, which end at once."""
    num_merged_boundaries: int = 0
    """Examples whose joined text would give other tokens than prompt and response apart, of those checked."""
    num_checked_boundaries: int = 0
    unwritable: Mapping[str, int] = field(default_factory=dict)
    """Characters without a token -> how often they occur in distinct texts."""
    remarks: Mapping[Remark, int] = field(default_factory=dict)
    """Remarks of the readers -> number of rows."""
    unread: Mapping[str, int] = field(default_factory=dict)
    """Keys of messages that the chat template ignores -> number of rows."""
    num_tokens: int = 0
    """Number of tokens of all kept rows."""
    num_characters: int = 0
    """Characters of the text that is trained on, for bits per character."""

    def __add__(self, other: "LoadReport") -> "LoadReport":
        """The counts of two portions of a load together."""
        sums: dict[str, Any] = {
            each.name: dict(Counter(mine) + Counter(others)) if isinstance(mine, Mapping) else mine + others
            for each in fields(self)
            for mine, others in [(getattr(self, each.name), getattr(other, each.name))]
        }
        return LoadReport(**sums)

    def __str__(self) -> str:
        """One line: rows kept, rows lost, and what to check."""
        parts = [f"{self.num_kept_rows:,} of {count_of(self.num_rows, 'row')} kept"]
        counts = {
            "too long, dropped": self.num_too_long,
            "truncated": self.num_truncated,
            "with too short a response, dropped": self.num_too_short,
            "without a token to learn, dropped": self.num_without_targets,
            "with steps that the separator does not separate, dropped": self.num_inseparable,
        }
        parts += [f"{count:,} {what}" for what, count in counts.items() if count]
        dropped = {"identical pair": self.num_identical_pairs, "tie": self.num_ties}
        parts += [f"{count_of(count, noun)} dropped" for noun, count in dropped.items() if count]
        kept = {
            "duplicate": self.num_duplicates,
            "empty response": self.num_empty_responses,
        }
        parts += [count_of(count, noun) for noun, count in kept.items() if count]
        if self.num_merged_boundaries:
            parts.append(
                f"{self.num_merged_boundaries:,} of {self.num_checked_boundaries:,} checked have other tokens "
                "as one text (a separator may be missing between prompt and response, or a prompt ends in a space)"
            )
        if self.unwritable:
            most = sorted(self.unwritable, key=lambda character: -self.unwritable[character])[:5]
            parts.append(
                f"the tokenizer cannot write {len(self.unwritable):,} of the characters "
                f"({' '.join(map(repr, most))}{' ...' if len(self.unwritable) > len(most) else ''}), "
                f"which occur {count_of(sum(self.unwritable.values()), 'time')} in the texts and are lost"
            )
        notes = [*remark_lines(self.remarks), *unread_lines(self.unread)]
        return "; ".join([", ".join(parts), count_of(self.num_tokens, "token"), *notes])
