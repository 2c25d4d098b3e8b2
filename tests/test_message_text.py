"""Pages that texts of the package name: each is there, with its section, and its address leads to it."""

import importlib.metadata
import re
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

from proximo import message_text
from proximo.errors import ConfigError

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "proximo"
NAMED = re.compile(r"docs/(?P<page>[\w/-]+)\.md(?:#(?P<anchor>[\w-]+))?(?:,\s+(?:#\s+)?\"(?P<title>[^\"]+)\")?")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    message_text._site.cache_clear()
    yield
    message_text._site.cache_clear()


def named() -> list[tuple[str, re.Match[str]]]:
    files = (path for path in sorted(PACKAGE.rglob("*")) if path.suffix in (".py", ".yaml", ".c", ".html", ".j2"))
    return [
        (str(path.relative_to(PACKAGE)), found)
        for path in files
        for found in NAMED.finditer(path.read_text(encoding="utf-8"))
    ]


def titles(page: str) -> list[str]:
    text = FENCE.sub("", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    return [line.lstrip("#").strip() for line in text.splitlines() if line.startswith("#")]


def anchor_of(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def test_every_page_that_the_package_names_is_there_with_the_section() -> None:
    found = named()
    assert len(found) > 90
    assert sum(match["title"] is not None for _, match in found) > 5
    for file, match in found:
        assert (ROOT / "docs" / f"{match['page']}.md").is_file(), (file, match[0])
        if match["title"] is not None:
            wanted = " ".join(match["title"].split())
            assert wanted in titles(match["page"]), (file, match[0])
        if match["anchor"] is not None:
            assert match["anchor"] in map(anchor_of, titles(match["page"])), (file, match[0])


def test_a_page_is_named_by_a_file_from_where_the_reader_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: Message())
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    monkeypatch.chdir(tmp_path)
    assert message_text.address("vllm") == str(ROOT / "docs" / "vllm.md")
    assert Path(message_text.address("coming-from/trl")).is_file()
    monkeypatch.chdir(ROOT)
    assert message_text.address("vllm") == "docs/vllm.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(ROOT.parent))
    assert message_text.address("vllm") == f"~/{ROOT.name}/docs/vllm.md"


def test_a_package_that_names_its_site_has_its_pages_there(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Message()
    told["Project-URL"] = "Source, https://example.org/source"
    told["Project-URL"] = "Documentation, https://example.org/proximo/"
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: told)
    assert message_text.address("coming-from/trl") == "https://example.org/proximo/coming-from/trl.html"
    assert str(ConfigError("see docs/vllm.md.")) == "see https://example.org/proximo/vllm.html."


def test_only_pages_are_replaced_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    others = "my/docs/vllm.md, /docs/vllm.md, docs/my-own-notes.md, docs/vllm.mdx, a.docs/vllm.md"
    assert message_text.with_addresses(others) == others
    once = message_text.with_addresses('(docs/vllm.md) and docs/data.md, "Problems with an answer".')
    assert once == f'({ROOT}/docs/vllm.md) and {ROOT}/docs/data.md, "Problems with an answer".'
    assert message_text.with_addresses(once) == once
