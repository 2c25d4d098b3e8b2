"""Formats numbers and durations for progress lines, tables and the report."""

ROUNDING = {"nats": 1e-6}
"""First word of a unit -> size below which a number is float32 rounding error and shown as 0."""


def format_number(number: float | None, unit: str = "") -> str:
    """About three significant digits, with thousands separators; `-` for None.

    With a unit of `ROUNDING`, a number of the size of a rounding error is 0.
    """
    if number is None:
        return "-"
    size = abs(number)
    if size < ROUNDING.get(unit.partition(" ")[0], 0.0) or size == 0:
        return "0"
    return f"{number:{_form(number, size)}}"


def _form(number: float, size: float) -> str:
    if not 0.001 <= size < 1e9:  # shown as 1.2e-04; inf and nan come here too
        return ".1e"
    if size >= 1000:
        return ",.0f"
    if number == int(number) and (size >= 10 or isinstance(number, int)):
        return ".0f"
    decimals = next((decimals for least, decimals in ((100, 0), (10, 1), (0.1, 2), (0.01, 3)) if size >= least), 4)
    return f".{decimals}f"


def format_change(before: float | None, after: float | None) -> str:
    """The difference with its sign; empty if one of the two is None."""
    if before is None or after is None:
        return ""
    change = after - before
    sign = "+" if change > 0 else "-" if change < 0 else ""
    return sign + format_number(abs(change))


def format_duration(seconds: float) -> str:
    """Formats a duration, for example 12s, 3m05s, 2h07m or 3d04h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
