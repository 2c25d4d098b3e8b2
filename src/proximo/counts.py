"""Words for counts in messages."""


def count_of(number: float, noun: str, plural: str | None = None) -> str:
    """The number and what it counts: `1 row`, `2,000 rows`, `0.5 epochs`. `plural`: one that is no noun with an s."""
    digits = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{digits} {noun if number == 1 else plural or f'{noun}s'}"
