"""How numbers are shown to people: in progress lines, tables and the report. Not how they are stored."""


def format_number(number: float | None) -> str:
    """About three significant digits, thousands apart, `-` for a number that is not there."""
    if number is None:
        return "-"
    size = abs(number)
    if size >= 1000:
        return f"{number:,.0f}"
    if number == int(number) and (size >= 10 or number == 0 or isinstance(number, int)):
        return f"{number:.0f}"
    if size < 0.001:
        return f"{number:.1e}"
    decimals = next((decimals for least, decimals in ((100, 0), (10, 1), (0.1, 2)) if size >= least), 3)
    return f"{number:.{decimals}f}"


def format_change(before: float | None, after: float | None) -> str:
    """The difference, with its sign; empty where one side is missing."""
    if before is None or after is None:
        return ""
    change = after - before
    sign = "+" if change > 0 else "-" if change < 0 else ""
    return sign + format_number(abs(change))


def format_duration(seconds: float) -> str:
    """12s, 3m05s, 2h07m, 3d04h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
