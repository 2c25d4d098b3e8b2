"""The pages of the documentation taken apart: links, code words, blocks. Not what is checked about them."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMING_FROM = ROOT / "docs" / "coming-from"
PAGES = (
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(COMING_FROM.glob("*.md")),
)
SOURCES = (ROOT, ROOT / "src" / "proximo", ROOT / "src")
"""Where a path in the text may begin."""

FENCE = re.compile(r"^```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block."""

    language: str
    text: str
    line: int


def blocks(page: Path, language: str) -> list[Block]:
    """The fenced blocks of one language, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(language=language, text=match["text"], line=text.count("\n", 0, match.start()) + 1)
        for match in FENCE.finditer(text)
        if match["language"] == language
    ]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """Targets of the links that lead to files or headings of this project."""
    found = [match["target"] for match in LINK.finditer(prose(page))]
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def code_words(page: Path) -> set[str]:
    """What stands between backticks in the prose."""
    return set(CODE.findall(prose(page)))


def anchors(page: Path) -> set[str]:
    """The names that headings can be linked by, as GitHub makes them."""
    headings = HEADING.findall(prose(page))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def named_path(word: str) -> tuple[str, str | None] | None:
    """(path, name in it) where a code word speaks of a file or folder of this project; else None."""
    path, _, name = word.partition("::")
    is_python = path.endswith(".py") and ("/" in path or "::" in word)
    is_ours = path.partition("/")[0] in ("src", "tests", "docs", "examples", "benchmarks", "recipes") and "/" in path
    return (path, name or None) if (is_python or is_ours) and not set("*<>{} ") & set(word) else None


def find_path(path: str) -> Path | None:
    """The file or folder, wherever below the project the text may mean it to begin."""
    return next((folder / path for folder in SOURCES if (folder / path).exists()), None)


@cache
def defined_names(file: Path) -> set[str]:
    """Functions, classes and constants of a module, and methods as `Class.method`."""
    return set(_names(ast.parse(file.read_text(encoding="utf-8")).body))


def _names(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef():
                yield node.name
            case ast.ClassDef():
                yield node.name
                yield from (f"{node.name}.{name}" for name in _names(node.body))
            case ast.Assign():
                yield from (target.id for target in node.targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
