"""The rows of a run without data: each begins an episode with another seed."""

from collections.abc import Iterator


def numbered_rows(num_rows: int) -> Iterator[dict[str, int]]:
    """Rows with nothing but their number, from 0 on."""
    yield from ({"episode": number} for number in range(num_rows))
