"""The site of the documentation: it is built strictly, has every page, and loads nothing from elsewhere."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import PAGES, ROOT

EXTRA = ("mkdocs", "material", "mkdocstrings_handlers")
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}
"""Tags that fetch what they name, by the attribute that names it. A link of `a` is followed by the reader alone."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` gives to the generator."""
    folder = tmp_path_factory.mktemp("site") / "pages"
    subprocess.run([sys.executable, ROOT / "docs/theme/stage.py", folder], check=True)
    return folder


@pytest.fixture(scope="module")
def site(pages: Path) -> Path:
    if missing := [name for name in EXTRA if find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed: the extra `docs` has them (make docs)")
    folder = pages.parent / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "-f", ROOT / "mkdocs.yml", "-d", folder]
    environment = {**os.environ, "PROXIMO_SITE_PAGES": str(pages), "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr
    return folder


def test_the_order_of_the_pages_has_each_of_them_once(pages: Path) -> None:
    order = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    named = re.findall(r"(\S+\.md)$", order, re.MULTILINE)
    assert len(named) == len(set(named))
    assert set(named) == {path.relative_to(pages).as_posix() for path in pages.rglob("*.md")}


def test_every_page_of_the_documentation_is_on_the_site(pages: Path) -> None:
    """Their headings are compared, as some of them have moved."""
    assert {heading(page) for page in PAGES} <= {heading(path) for path in pages.rglob("*.md")}


def test_links_show_titles_of_pages_and_lead_to_where_these_are(pages: Path) -> None:
    shown = re.findall(r"\[([^]]*)\]\(([^)#]*)", (pages / "choosing.md").read_text(encoding="utf-8"))
    assert ("How PPO works here", "ppo.md") in shown
    assert ("Benchmarks", "benchmarks.md") in shown
    assert not [words for words, _ in shown if words.endswith(".md")]


def test_the_index_for_programs_leads_to_every_page(pages: Path) -> None:
    index = (pages / "llms.txt").read_text(encoding="utf-8")
    linked = {target.removesuffix(".html") for target in re.findall(r"^- \[.+\]\((\S+)\): .", index, re.MULTILINE)}
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} - {"README"} <= linked


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    found = [(page.name, source) for page in site.rglob("*.html") for source in loaded_by(page)]
    sheets = [
        (sheet.name, source)
        for kind in ("*.css", "*.svg")
        for sheet in site.rglob(kind)
        for source in re.findall(r"url\(([^)]*)", text(sheet))
    ]
    assert found
    assert not [(name, source) for name, source in found + sheets if re.match(r"[\"']?(https?:)?//", source)]


def test_what_the_pages_load_exists(site: Path) -> None:
    for page in site.rglob("*.html"):
        for source in loaded_by(page):
            path = site / source[1:] if source.startswith("/") else page.parent / source
            assert source.startswith("data:") or Path(path.as_posix().partition("#")[0].partition("?")[0]).exists(), (
                source
            )


def test_every_public_name_is_on_the_page_of_names(site: Path) -> None:
    import proximo.api

    page = text(site / "api.html")
    assert not [name for name in proximo.api.__all__ if f'id="proximo.api.{name}"' not in page]


def test_every_pure_function_is_on_the_page_of_formulas(site: Path) -> None:
    page = text(site / "formulas.html")
    modules = [path for path in (ROOT / "src/proximo/algorithms").glob("*.py") if path.stem != "__init__"]
    functions = [
        f"proximo.algorithms.{path.stem}.{name}"
        for path in modules
        for name in re.findall(r"^(?:def|class) ([A-Za-z]\w*)", text(path), re.MULTILINE)
    ]
    assert len(functions) > 50
    assert not [name for name in functions if f'id="{name}"' not in page]


def test_the_search_knows_the_pages(site: Path) -> None:
    index = text(site / "search" / "search_index.js")
    assert all(word in index for word in ("getting-started.html", "configuration.html", "api.html"))


def heading(page: Path) -> str:
    """The first heading; what stands before it is for the search."""
    return next(line for line in text(page).splitlines() if line.startswith("# "))


@pytest.mark.parametrize("page", ["faq", "getting-started", "rewards"])
def test_pages_that_teach_come_first_in_the_search(site: Path, page: str) -> None:
    index = json.loads(text(site / "search" / "search_index.json"))["docs"]
    boosts = {entry["location"].partition("#")[0]: entry.get("boost", 1) for entry in index}
    assert boosts[f"{page}.html"] > 1 > boosts["api.html"]


def text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def loaded_by(page: Path) -> list[str]:
    """What a browser fetches to show a page."""
    reader = Loads()
    reader.feed(text(page))
    return reader.found


class Loads(HTMLParser):
    """Collects what tags fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        fetched = given.get(LOADED.get(tag, ""))
        if fetched and given.get("rel") not in ("canonical", "next", "prev"):
            self.found.append(fetched)
