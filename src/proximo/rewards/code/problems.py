"""Problems as rows hold them: tests as asserts, a function `check`, or inputs and outputs. Not how they are graded."""

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from proximo.errors import DataError
from proximo.rewards.code.ast_names import names_of, parsed
from proximo.rewards.code.parsed_asserts import Comparison, comparisons_of

Form = Literal["asserts", "check", "stdio", "input_output"]
DEFAULT_TESTS: Mapping[str, tuple[str, ...]] = {
    "asserts": ("test_list",),
    "check": ("test",),
    "stdio": ("inputs", "outputs"),
    "input_output": ("input_output",),
}
"""Columns that hold the tests of each form."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Where the parts of a problem are in a row's metadata."""

    tests: tuple[str, ...]
    setup: tuple[str, ...]
    before: str | None
    entry_point: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TestSuite:
    """Tests in Python that call what the program defines."""

    __test__ = False

    modules: tuple[str, ...]
    names: tuple[tuple[str, str], ...]
    """(name in the tests, name in the program)."""
    setup: str
    tests: tuple[str, ...]
    setup_uses_program: bool
    comparisons: tuple[Comparison, ...] | None
    """The same tests, where all of them are comparisons: nothing of them has to be run then."""


@dataclass(frozen=True, slots=True)
class InputsOutputs:
    """What the program reads on standard input, and what it has to write."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """Arguments of a function of the program, and what it has to return: values of JSON."""

    function: str
    arguments: tuple[Sequence[Any], ...]
    expected: tuple[Any, ...]


Problem = TestSuite | InputsOutputs | Calls


def read_problem(form: Form, columns: Columns, metadata: Mapping[str, Any], prompt: str) -> Problem:
    """Raises DataError, with the column and what is wrong with it, for what cannot be graded or has no test."""
    if form == "asserts":
        tests = [text for name in columns.tests for text in _texts(metadata, name)]
        return _asserts(tuple(tests), _setup(columns, metadata))
    if form == "check":
        entry_point = _one_text(metadata, columns.entry_point, "the name of its function")
        test = "\n".join(_one_text(metadata, name) for name in columns.tests)
        return _check(test, entry_point, prompt, _setup(columns, metadata))
    if form == "stdio":
        inputs, outputs = (_column(metadata, name) for name in columns.tests)
        return _pairs(inputs, outputs, " and ".join(columns.tests))
    (name,) = columns.tests
    return _input_output(_column(metadata, name), name)


def text_before(columns: Columns, metadata: Mapping[str, Any]) -> str:
    """Code that is put before the program."""
    return "\n".join(_texts(metadata, columns.before)) if columns.before else ""


@lru_cache(maxsize=1024)
def _asserts(tests: tuple[str, ...], setup: str) -> TestSuite:
    if not tests:
        raise DataError("a problem needs at least one test, but its list of tests is empty")
    return _suite(tests, setup, {})


@lru_cache(maxsize=1024)
def _check(test: str, entry_point: str, prompt: str, setup: str) -> TestSuite:
    tree = _python(test, "the tests")
    checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if len(checks) != 1 or len(checks[0].args.args) != 1:
        raise DataError("the tests must define one function check(candidate), but they do not")
    candidate = checks[0].args.args[0].arg
    steps = _steps(checks[0])
    if steps is None:
        steps = (f"check({candidate})",)
    else:
        tree.body.remove(checks[0])
    around = "\n".join((_without(entry_point, prompt), setup, ast.unparse(tree)))
    return _suite(steps, around, {candidate: entry_point})


def _suite(tests: tuple[str, ...], setup: str, names: Mapping[str, str]) -> TestSuite:
    try:
        found = names_of((setup, *tests))
        in_setup = set(names_of((setup,)).program)
    except SyntaxError as error:
        raise DataError(f"the tests are not Python: {error}") from error
    pairs = {name: name for name in found.program} | dict(names)
    if not pairs:
        raise DataError("the tests use no name that a program could define, so that they test nothing")
    return TestSuite(
        modules=found.modules,
        names=tuple(pairs.items()),
        setup=setup,
        tests=tests,
        setup_uses_program=bool(in_setup & pairs.keys()),
        comparisons=None if in_setup & pairs.keys() else comparisons_of(tests, setup, pairs),
    )


def _steps(check: ast.FunctionDef) -> tuple[str, ...] | None:
    """The body of check() as one test for each of its asserts; None where it has to stay a function.

    What leads to an assert belongs to it. An assert of a constant, which says nothing, is left out.
    """
    if any(isinstance(node, ast.Return | ast.Yield | ast.Nonlocal | ast.Global) for node in ast.walk(check)):
        return None
    steps: list[list[ast.stmt]] = [[]]
    for statement in check.body:
        if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Constant) and statement.test.value:
            continue
        steps[-1].append(statement)
        if any(isinstance(node, ast.Assert) for node in ast.walk(statement)):
            steps.append([])
    if len(steps) > 1 and not steps[-1]:
        steps.pop()
    return tuple("\n".join(map(ast.unparse, step)) for step in steps if step) or None


def _without(entry_point: str, prompt: str) -> str:
    """What the prompt itself defines before the function that is asked for: it is not the program's to define.

    A prompt that is no code, or that breaks off elsewhere than at the body of that function, defines nothing.
    """
    for text in (prompt, f"{prompt.rstrip()}\n    pass\n"):
        try:
            tree = parsed(text)
        except SyntaxError:
            continue
        tree.body = [node for node in tree.body if getattr(node, "name", None) != entry_point]
        return ast.unparse(tree)
    return ""


def _pairs(inputs: Any, outputs: Any, where: str) -> InputsOutputs:
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple) or len(inputs) != len(outputs):
        raise DataError(f"{where} must be two lists of the same length, inputs and outputs")
    if not inputs:
        raise DataError(f"a problem needs at least one test, but {where} are empty")
    return InputsOutputs(tuple((_lines(i, where), _lines(o, where)) for i, o in zip(inputs, outputs, strict=True)))


def _lines(value: Any, where: str) -> str:
    if isinstance(value, list | tuple) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise DataError(f"{where} must hold texts, or lists of lines, got {type(value).__name__}")
    return value


def _input_output(value: Any, name: str) -> InputsOutputs | Calls:
    try:
        found = json.loads(value) if isinstance(value, str) else value
        inputs, outputs = found["inputs"], found["outputs"]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{name} must be JSON with inputs and outputs: {type(error).__name__}: {error}") from error
    if found.get("fn_name") is None:
        return _pairs(inputs, outputs, name)
    if not inputs or len(inputs) != len(outputs) or not all(isinstance(each, list) for each in inputs):
        raise DataError(f"{name} with fn_name needs as many outputs as inputs, at least one, each input a list")
    return Calls(function=str(found["fn_name"]), arguments=tuple(inputs), expected=tuple(outputs))


def _setup(columns: Columns, metadata: Mapping[str, Any]) -> str:
    return "\n".join(text for name in columns.setup if metadata.get(name) for text in _texts(metadata, name))


def _python(source: str, what: str) -> ast.Module:
    try:
        return parsed(source)
    except SyntaxError as error:
        raise DataError(f"{what} are not Python: {error}") from error


def _column(metadata: Mapping[str, Any], name: str, what: str = "its tests") -> Any:
    if metadata.get(name) is None:
        raise DataError(f"the row has no column {name}, which holds {what}; it has {', '.join(metadata) or 'none'}")
    return metadata[name]


def _one_text(metadata: Mapping[str, Any], name: str, what: str = "its tests") -> str:
    value = _column(metadata, name, what)
    if not isinstance(value, str):
        raise DataError(f"column {name} must be a text, got {type(value).__name__}")
    return value


def _texts(metadata: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A text, or a list of texts, with the line ends of Python."""
    value = _column(metadata, name)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise DataError(f"column {name} must be a text or a list of texts")
    return tuple(text.replace("\r\n", "\n") for text in texts)
