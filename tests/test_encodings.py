"""No file is read or written in the encoding of whatever locale there is."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src"
TEXT_CALLS = {"open", "read_text", "write_text", "fdopen"}


def calls_without_encoding(source: str) -> Iterator[int]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        if name not in TEXT_CALLS or (isinstance(owner, ast.Name) and owner.id == "os"):
            continue
        constants = [
            each.value for each in (*node.args, *(k.value for k in node.keywords)) if isinstance(each, ast.Constant)
        ]
        binary = any(isinstance(each, str) and "b" in each and len(each) <= 3 for each in constants)
        mode_unknown = any(isinstance(each, ast.JoinedStr) for each in node.args)
        if not binary and not mode_unknown and "encoding" not in {each.arg for each in node.keywords}:
            yield node.lineno


def test_every_text_file_has_an_encoding() -> None:
    found = [
        f"{path}:{line}" for path in SOURCES.rglob("*.py") for line in calls_without_encoding(path.read_text("utf-8"))
    ]
    assert not found


@pytest.mark.parametrize("call", ["open('x')", "Path('x').read_text()", "path.open('a')", "path.write_text('x')"])
def test_a_call_without_one_is_found(call: str) -> None:
    assert list(calls_without_encoding(call)) == [1]


@pytest.mark.parametrize(
    "call", ["open('x', 'rb')", "path.read_text(encoding='utf-8')", "path.open('a', encoding='utf-8')", "os.open(p, 0)"]
)
def test_a_call_that_needs_none_is_not(call: str) -> None:
    assert not list(calls_without_encoding(call))
