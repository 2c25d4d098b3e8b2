"""Prompts that begin episodes: rows without ids, which the first observation gives."""

from collections.abc import Mapping, Sequence
from typing import Any

from proximo.data.rows import Row, row_ids
from proximo.errors import DataError
from proximo.records import Prompt
from proximo_verifiers.workers.frames import encode


def row_prompts(rows: Sequence[Row]) -> list[Prompt]:
    """One prompt for each row of the data.

    Raises DataError where two rows have one id, and for a row that cannot be sent to the process of an environment.
    """
    for row in rows:
        try:
            encode(dict(row.values))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{row.origin}: the row is sent to the process of an environment as JSON, and a column cannot be "
                f"converted ({error}); leave that column out with columns in its source, or write it as text"
            ) from error
    return [
        Prompt(id=name, token_ids=(), metadata=dict(row.values)) for name, row in zip(row_ids(rows), rows, strict=True)
    ]


def given_prompts(given: int | Sequence[Mapping[str, Any] | Prompt]) -> list[Prompt]:
    """Prompts of rows that are given in Python; of a number of episodes without rows. Ids are their indices.

    Raises DataError for other types.
    """
    rows = [{}] * given if isinstance(given, int) and not isinstance(given, bool) else given
    if isinstance(rows, str | Mapping) or not isinstance(rows, Sequence):
        raise DataError(
            f"an environment is played from rows, a list of mappings, or from a number of episodes, got {given!r:.60}"
        )
    return [_prompt(index, row) for index, row in enumerate(rows)]


def _prompt(index: int, row: Any) -> Prompt:
    if isinstance(row, Prompt):
        return row
    if not isinstance(row, Mapping):
        raise DataError(f"a row of an environment must be a mapping, or a Prompt, got {row!r:.60}")
    return Prompt(id=str(index), token_ids=(), metadata=dict(row))
