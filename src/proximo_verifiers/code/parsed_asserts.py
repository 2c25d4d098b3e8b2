"""Reads the source of tests: the names that they need of a program, and asserts that only compare with a literal.

The source of the program is not consulted for the names, because a program could claim any. A name that the tests do
not define, import or take from the builtins belongs to the program. A program that redefines `sorted` or `set` changes
nothing for the tests.
A test such as `assert f(1) == 2` need not be run. The program gets the arguments, and the result is compared outside
the sandbox by the process that holds the expected value. The result is that of the test itself, at half the cost.
"""

import ast
import builtins
import json
import sys
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NoReturn

from proximo_verifiers.code.inside.codec import ValueEncoder, ValueRefusedError

MAX_CHARACTERS = 20_000
"""Largest total length of the tests, since the program's process compiles the arguments."""
GENERIC = frozenset({"dict", "frozenset", "list", "set", "tuple", "type"})
"""Built-in types that annotations may subscript."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedAssert:
    """`assert name(arguments) == expected, message`, or with `is` for None, True or False."""

    name: str
    """Name of the function in the test."""
    function: str
    """Name of the function in the program."""
    arguments: str
    """Python source such as `(1, [2]), {"key": 3}`. It is evaluated in the program's process, which fixes set order."""
    expected: Any
    identical: bool
    message: str

    def holds(self, value: Any) -> bool:
        """True if the test passes for this return value."""
        return value is self.expected if self.identical else value == self.expected


def comparisons_of(tests: Sequence[str], setup: str, functions: Mapping[str, str]) -> tuple[ParsedAssert, ...] | None:
    """The parsed tests if all of them are comparisons and their set-up has no effect, else None.

    `functions` maps names in the tests to names in the program.
    """
    if sum(map(len, tests)) > MAX_CHARACTERS or not all(map(_compiles, (setup, *tests))):
        return None
    before = parsed(setup)
    if functions.keys() & set(bound_in(before)) or not all(map(_does_nothing, before.body)):
        return None
    comparisons = []
    for test in tests:
        comparison = _comparison(parsed(test).body, functions)
        if comparison is None:
            return None
        comparisons.append(comparison)
    return tuple(comparisons)


def _compiles(source: str) -> bool:
    """True if the source compiles. Some errors, such as a repeated keyword, are not found by the parser."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, "<tests>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _does_nothing(statement: ast.stmt) -> bool:
    """True for a statement that cannot fail and defines nothing that comparisons use."""
    match statement:
        case ast.FunctionDef(decorator_list=[], args=arguments, returns=returns):
            every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
            annotations = [returns, *(child.annotation for child in every if child is not None)]
            no_defaults = not arguments.defaults and not any(arguments.kw_defaults)
            return no_defaults and all(child is None or _is_annotation(child) for child in annotations)
        case ast.Assign(targets=targets, value=value):
            return all(isinstance(child, ast.Name) for child in targets) and _is_plain(value)
        case ast.Expr(value=value):
            return _is_plain(value)
        case ast.Import(names=names):
            return all(child.name in sys.stdlib_module_names and find_spec(child.name) for child in names)
        case ast.ImportFrom(module="typing", names=names, level=0):
            return all(hasattr(typing, child.name) for child in names)
    return False


def _is_annotation(node: ast.expr) -> bool:
    """True for names and `Name[...]`. Python evaluates annotations, so anything else may have an effect."""
    for child in ast.walk(node):
        if isinstance(child, ast.Subscript):
            generic = isinstance(child.value, ast.Name) and (
                child.value.id in GENERIC or not hasattr(builtins, child.value.id)
            )
            if not generic:
                return False
        elif not isinstance(child, ast.Name | ast.Constant | ast.Tuple | ast.expr_context):
            return False
    return True


def _comparison(statements: list[ast.stmt], functions: Mapping[str, str]) -> ParsedAssert | None:
    match statements:
        case [ast.Assert(test=ast.Compare(left=left, ops=[operator], comparators=[right]), msg=message)]:
            call, value = (left, right) if isinstance(left, ast.Call) else (right, left)
        case _:
            return None
    match call, message or ast.Constant(value=""):
        case ast.Call(func=ast.Name(id=name)), ast.Constant(value=str(text)) if name in functions:
            arguments = _arguments(call)
        case _:
            return None
    single = isinstance(value, ast.Constant) and (value.value is None or isinstance(value.value, bool))
    compares = isinstance(operator, ast.Eq) or (isinstance(operator, ast.Is) and single)
    if arguments is None or not compares or not _is_plain(value):
        return None
    return ParsedAssert(
        name=name,
        function=functions[name],
        arguments=arguments,
        expected=ast.literal_eval(value),
        identical=isinstance(operator, ast.Is),
        message=text,
    )


def _arguments(call: ast.Call) -> str | None:
    """The source for `ParsedAssert.arguments`; None if an argument is not a plain value."""
    named = [(child.arg, child.value) for child in call.keywords]
    if not all(map(_is_plain, [*call.args, *(value for _, value in named)])) or any(name is None for name, _ in named):
        return None
    values = [ast.literal_eval(child) for child in call.args]
    if not _crosses((tuple(values), tuple((name, ast.literal_eval(value)) for name, value in named))):
        return None
    positions = "".join(f"{ast.unparse(child)}, " for child in call.args)
    keywords = ", ".join(f"{name!r}: {ast.unparse(value)}" for name, value in named)
    return f"({positions}), {{{keywords}}}"


def _crosses(value: Any) -> bool:
    """True if the codec can encode the value, which excludes deep nesting and very long numbers."""
    try:
        json.dumps(ValueEncoder([], _no_object).tree(value))
    except (ValueError, RecursionError):
        return False
    return True


def _no_object(value: Any) -> NoReturn:
    raise ValueRefusedError(f"an object of class {type(value).__name__} is not a plain value")


def _is_plain(node: ast.expr) -> bool:
    """True for a literal of the types that the codec supports (inside/codec.py)."""
    for child in ast.walk(node):
        if isinstance(child, ast.Call) or (isinstance(child, ast.Constant) and child.value is ...):
            return False
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


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
