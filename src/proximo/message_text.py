"""Text of messages: counts with their nouns, numbers, durations, and addresses of the pages of the documentation.

Messages name a page as `docs/vllm.md`. `with_addresses` replaces that where a message is printed, by an address on the
site that the package names, or by the path of the copy that is installed with the package.
"""

import re
from functools import cache
from pathlib import Path

PAGE = re.compile(r"(?<![\w./~-])docs/((?:[\w-]+/)*[\w.-]+)\.md\b")
ROUNDING = {"nats": 1e-6}
"""First word of a unit -> size below which a number is float32 rounding error and shown as 0."""
SITE = "Documentation"
"""The label of the site among the addresses of the package."""


def count_of(number: float, noun: str, plural: str | None = None) -> str:
    """The number with its noun: `1 row`, `2,000 rows`, `0.5 epochs`. `plural`: for a plural without a final s."""
    digits = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{digits} {noun if number == 1 else plural or f'{noun}s'}"


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


def with_addresses(text: str) -> str:
    """The text with each page that it names replaced by its address. Other files below a `docs/` are not changed."""
    return PAGE.sub(_address_of, text) if "docs/" in text else text


def _address_of(found: re.Match[str]) -> str:
    return address(found[1]) if (folder() / f"{found[1]}.md").is_file() else found[0]


def address(page: str) -> str:
    """The address of a page (`vllm`, `coming-from/trl`): a file that can be opened, or a page of the site.

    A file below the working directory or the home directory is named from there.
    """
    if (site := _site()) is not None:
        return f"{site.rstrip('/')}/{page}.html"
    path = folder() / f"{page}.md"
    for above, shown in ((Path.cwd(), Path()), (Path.home(), Path("~"))):
        if path.is_relative_to(above):
            return str(shown / path.relative_to(above))
    return str(path)


def folder() -> Path:
    """The folder with the pages: in the package for a wheel, next to the sources in a checkout."""
    package = Path(__file__).parent
    inside = package / "docs"
    return inside if inside.is_dir() else package.parents[1] / "docs"


@cache
def _site() -> str | None:
    """The address of the site in the metadata of the installed package; None where there is none."""
    from importlib.metadata import PackageNotFoundError, metadata  # takes half of a worker's start

    try:
        addresses = metadata("proximo").get_all("Project-URL") or []
    except PackageNotFoundError:  # a copy of the sources that is not installed
        return None
    named = (entry.partition(",") for entry in addresses)
    return next((url.strip() for label, _, url in named if label.strip() == SITE), None)
