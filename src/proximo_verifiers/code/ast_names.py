"""Finds the names that tests need from a program, from the source of the tests alone.

The source of the program is not consulted, because a program could claim any name. A name that the tests do not define,
import or take from the builtins belongs to the program. A program that redefines `sorted` or `set` changes nothing for
the tests.
"""

import ast
import builtins
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """Names that tests use without defining them."""

    program: tuple[str, ...]
    modules: tuple[str, ...]
    """Standard library modules that the tests use without an import, such as `sys` in `sys.getsizeof(f(1))`."""


def names_of(sources: Iterable[str]) -> Names:
    """The names that all sources together need. Raises SyntaxError.

    If no name is left, the program must redefine a builtin: then the names are the builtins that every source with an
    assert calls.
    """
    trees = [parsed(source) for source in sources]
    used = {name for tree in trees for name in _loaded(tree)}
    free = used - {name for tree in trees for name in bound_in(tree)} - set(dir(builtins))
    modules = {name for name in free if name in sys.stdlib_module_names and _only_dereferenced(trees, name)}
    program = free - modules
    if not program:
        called = [set(_called(tree)) for tree in trees if any(isinstance(node, ast.Assert) for node in ast.walk(tree))]
        program = set.intersection(*called) & set(dir(builtins)) if called else set()
    return Names(program=tuple(sorted(program)), modules=tuple(sorted(modules)))


def parsed(source: str) -> ast.Module:
    """Parses Python without warnings, since the style of the tests is not the user's concern. Raises SyntaxError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def _loaded(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id


def bound_in(tree: ast.AST) -> Iterator[str]:
    """Names that the tree binds anywhere; `*` for a star import."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(name=name, asname=None):
                yield name.partition(".")[0]
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name


def _called(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id


def _only_dereferenced(trees: list[ast.Module], name: str) -> bool:
    """True if every use of the name is `name.attribute`."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    attributes = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    dereferenced = sum(isinstance(n.value, ast.Name) and n.value.id == name for n in attributes)
    return dereferenced == sum(isinstance(n, ast.Name) and n.id == name for n in nodes)
