"""What tests need from a program, read off the tests alone. Never off the program, which could claim any name.

A name that the tests do not define, import or take from Python itself is the program's. A program that defines `sorted`
or `set` anew changes nothing for the tests.
"""

import ast
import builtins
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """Names that tests use and do not define."""

    program: tuple[str, ...]
    modules: tuple[str, ...]
    """Modules of the standard library that the tests use without importing them: `sys` in `sys.getsizeof(f(1))`."""


def names_of(sources: Iterable[str]) -> Names:
    """The names of all sources together. Raises SyntaxError.

    Where nothing is left, the program is there to define a function that Python has as well: the built-in functions
    that every one of the sources that asserts calls are then the program's.
    """
    trees = [parsed(source) for source in sources]
    used = {name for tree in trees for name in _loaded(tree)}
    free = used - {name for tree in trees for name in bound_in(tree)} - set(dir(builtins))
    modules = {name for name in free if name in sys.stdlib_module_names and _only_looked_into(trees, name)}
    program = free - modules
    if not program:
        called = [set(_called(tree)) for tree in trees if any(isinstance(node, ast.Assert) for node in ast.walk(tree))]
        program = set.intersection(*called) & set(dir(builtins)) if called else set()
    return Names(program=tuple(sorted(program)), modules=tuple(sorted(modules)))


def parsed(source: str) -> ast.Module:
    """Raises SyntaxError, and warns of nothing: what the data's tests are written like is not the user's concern."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def _loaded(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id


def bound_in(tree: ast.AST) -> Iterator[str]:
    """Names that it defines anywhere, `*` where a module says which."""
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


def _only_looked_into(trees: list[ast.Module], name: str) -> bool:
    """True where every use of the name is `name.something`."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    looked_into = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    inside = sum(isinstance(n.value, ast.Name) and n.value.id == name for n in looked_into)
    return inside == sum(isinstance(n, ast.Name) and n.id == name for n in nodes)
