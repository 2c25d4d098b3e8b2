"""Text of messages: counts with their nouns, and addresses of the pages of the documentation.

Messages name a page as `docs/vllm.md`. `with_addresses` replaces that where a message is printed, by an address on the
site that the package names, or by the path of the copy that is installed with the package.
"""

import re
from functools import cache
from pathlib import Path

PAGE = re.compile(r"(?<![\w./~-])docs/((?:[\w-]+/)*[\w.-]+)\.md\b")
SITE = "Documentation"
"""The label of the site among the addresses of the package."""


def count_of(number: float, noun: str, plural: str | None = None) -> str:
    """The number with its noun: `1 row`, `2,000 rows`, `0.5 epochs`. `plural`: for a plural without a final s."""
    digits = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{digits} {noun if number == 1 else plural or f'{noun}s'}"


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
