"""Reads problems from rows: asserts, a function `check`, inputs and outputs, or calls."""

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from proximo_verifiers.code.parsed_asserts import ParsedAssert, comparisons_of, names_of, parsed
from proximo_verifiers.errors import DataError

Form = Literal["asserts", "check", "stdio", "input_output"]
TESTS_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "asserts": ("test_list",),
    "check": ("test",),
    "stdio": ("inputs", "outputs"),
    "input_output": ("input_output",),
}
"""The columns of the tests, by form."""
SETUP_COLUMNS = ("test_setup_code", "test_imports")
"""Columns with code that runs after the program and before the first test, where a row has them."""
ENTRY_POINT = "entry_point"
"""Column with the name of the requested function, for `check` and completions."""
STUB = "stub"
"""Column with the code that a completion continues, if it is not the prompt."""
CODE_BEFORE = "code_before"
"""Column with code that is prepended to the program, such as imports, if a row has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TestSuite:
    """Tests written in Python that call functions of the program."""

    __test__ = False

    modules: tuple[str, ...]
    names: tuple[tuple[str, str], ...]
    """Pairs (name in the tests, name in the program)."""
    setup: str
    tests: tuple[str, ...]
    setup_uses_program: bool
    comparisons: tuple[ParsedAssert, ...] | None
    """The parsed tests if all of them are comparisons, which need not be run."""


@dataclass(frozen=True, slots=True)
class InputsOutputs:
    """Pairs (standard input, expected output)."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """Lists of arguments of a function, and the expected results, as JSON values."""

    function: str
    arguments: tuple[Sequence[Any], ...]
    expected: tuple[Any, ...]


Problem = TestSuite | InputsOutputs | Calls


def read_problem(form: Form, tests_columns: Sequence[str], metadata: Mapping[str, Any], prompt: str) -> Problem:
    """The problem of a row. Raises DataError for a row without tests, or with an invalid column."""
    if form == "asserts":
        tests = [text for name in tests_columns for text in _texts(metadata, name)]
        return _asserts(tuple(tests), _setup(metadata))
    if form == "check":
        entry_point = _one_text(metadata, ENTRY_POINT, "the name of its function")
        test = "\n".join(_one_text(metadata, name) for name in tests_columns)
        return _check(test, entry_point, prompt, _setup(metadata))
    if form == "stdio":
        inputs, outputs = (_column(metadata, name) for name in tests_columns)
        return _pairs(inputs, outputs, " and ".join(tests_columns))
    (name,) = tests_columns
    return _input_output(_column(metadata, name), name)


def text_before(metadata: Mapping[str, Any]) -> str:
    """The code that is prepended to the program."""
    return "\n".join(_texts(metadata, CODE_BEFORE)) if metadata.get(CODE_BEFORE) is not None else ""


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
        names_used = names_of((setup, *tests))
        in_setup = set(names_of((setup,)).program)
    except SyntaxError as error:
        raise DataError(f"the tests are not Python: {error}") from error
    pairs = {name: name for name in names_used.program} | dict(names)
    if not pairs:
        raise DataError("the tests use no name that a program could define, so they test nothing")
    return TestSuite(
        modules=names_used.modules,
        names=tuple(pairs.items()),
        setup=setup,
        tests=tests,
        setup_uses_program=bool(in_setup & pairs.keys()),
        comparisons=None if in_setup & pairs.keys() else comparisons_of(tests, setup, pairs),
    )


def _steps(check: ast.FunctionDef) -> tuple[str, ...] | None:
    """The body of check() split into one test per assert; None if it cannot be split.

    The statements before an assert belong to its test. Asserts of constants are left out.
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
    """The code of the prompt without the requested function: helpers that a program cannot replace.

    Empty if the prompt is not Python, or does not end at the body of that function.
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
        problem = json.loads(value) if isinstance(value, str) else value
        inputs, outputs = problem["inputs"], problem["outputs"]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{name} must be JSON with inputs and outputs: {type(error).__name__}: {error}") from error
    if problem.get("fn_name") is None:
        return _pairs(inputs, outputs, name)
    if not inputs or len(inputs) != len(outputs) or not all(isinstance(arguments, list) for arguments in inputs):
        raise DataError(f"{name} with fn_name needs as many outputs as inputs, at least one, each input a list")
    return Calls(function=str(problem["fn_name"]), arguments=tuple(inputs), expected=tuple(outputs))


def _setup(metadata: Mapping[str, Any]) -> str:
    return "\n".join(text for name in SETUP_COLUMNS if metadata.get(name) for text in _texts(metadata, name))


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
    """The texts of a column, which holds one text or a list, with normalised line ends."""
    value = _column(metadata, name)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise DataError(f"column {name} must be a text or a list of texts")
    return tuple(text.replace("\r\n", "\n") for text in texts)
