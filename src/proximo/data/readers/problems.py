"""Turns rows of known data sets of problems into prompts with the columns that a verifier needs.

A converted row has `prompt`, `response` (a right answer to learn from, if the data set has one), `answer` (the
reference answer, if answers are compared), and the columns that a verifier reads. So fine-tuning and PPO can read the
same file.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from proximo.data.formats.context_columns import CONTEXT, MEDIA
from proximo.data.formats.typed_columns import cell, describe, text_cell
from proximo.data.readers.source import Problems, filled_in, named_in
from proximo.data.rows import Row
from proximo.errors import DataError

CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")
"""GSM8K's `<<48/2=24>>`: notes for a calculator, which are removed from the answer."""
NUMBER = re.compile(r"[-+]?\$?(\d[\d,]*)?\.?\d+%?")
BRACE = re.compile(r"(?P<box>\\boxed\{)|\\\\(?!boxed\{)|\\[{}]|(?P<brace>[{}])")
"""Opening and closing braces, after `\\boxed` and elsewhere; a brace after a backslash is a character."""
DEFINED = re.compile(r"^[ \t]*def[ \t]+(\w+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Problem:
    """The converted columns of a row, and further values for its template."""

    gives: Mapping[str, Any]
    uses: tuple[str, ...]
    shows: Mapping[str, str] = field(default_factory=dict)
    """Values that a template may name besides the row's columns."""


def as_problem(row: Row, problems: Problems, template: str | None = None) -> Row:
    """The row of a data set as one that every trainer reads; `template` makes the prompt.

    A template may name the row's columns and the values listed in `docs/data.md`. Raises DataError naming file and row
    for a row of another data set, and for an unknown name in the template.
    """
    read, own_template = _FORMS[problems]
    found = read(row)
    shown, template = replace(row, values={**row.values, **found.shows}), template or own_template
    prompt = str(filled_in(shown, "prompt", template))
    kept = {name: value for name, value in row.values.items() if name not in found.uses}
    values = {**kept, **found.gives, "prompt": prompt}
    # Other columns are read as in any row, unless a text already contains them.
    unread = (CONTEXT | MEDIA).difference(row.used, named_in(shown, template))
    return replace(row, values=values, used=tuple(name for name in values if name not in unread))


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` whose braces are closed; None if there is none."""
    opened: list[int | None] = []
    last, inside = 0, None
    for found in BRACE.finditer(text):
        if found["box"] or found["brace"] == "{":
            opened.append(found.end() if found["box"] else None)
        elif found["brace"] and opened and (start := opened.pop()) is not None and start > last:
            last, inside = start, text[start : found.start()].strip()
    return inside


def _gsm8k(row: Row) -> _Problem:
    solution = text_cell(row, "answer")
    _, mark, final = solution.rpartition("####")
    final = final.strip()
    if not mark or not NUMBER.fullmatch(final):
        raise DataError(f"{row.origin}: column 'answer' must end in #### and a number, as in GSM8K, got {final!r:.60}")
    text_cell(row, "question")
    gives = {"answer": final.replace(",", ""), "response": CALCULATOR_MARK.sub("", solution)}
    return _Problem(gives=gives, uses=("question", "answer"))


def _math(row: Row) -> _Problem:
    text_cell(row, "problem")
    solution = text_cell(row, "solution") if row.values.get("solution") is not None else ""
    if row.values.get("answer") is not None:
        answer: str | None = text_cell(row, "answer").strip()
    else:
        answer = last_boxed(solution)
    if not answer:
        raise DataError(f"{row.origin}: no reference answer: wanted a column 'answer', or \\boxed{{...}} in 'solution'")
    gives = {"answer": answer, **({"response": solution} if solution else {}), **_identity(row, "unique_id")}
    return _Problem(gives=gives, uses=("problem", "solution", "unique_id"))


def _humaneval(row: Row) -> _Problem:
    stub, test, name = text_cell(row, "prompt"), text_cell(row, "test"), text_cell(row, "entry_point")
    if "def check(" not in test or name not in DEFINED.findall(stub):
        raise DataError(
            f"{row.origin}: column 'prompt' must define '{name}', which is the entry_point, and column 'test' "
            "check(candidate), as in HumanEval"
        )
    gives = {"stub": stub, **_solution(row, "canonical_solution"), **_identity(row, "task_id")}
    return _Problem(gives=gives, uses=("prompt", "canonical_solution", "task_id"))


def _mbpp(row: Row) -> _Problem:
    """The full set has `text`, the sanitized one `prompt`."""
    column = "text" if "text" in row.values else "prompt"
    tests, code = _texts(row, "test_list"), text_cell(row, "code")
    names = [name for name in DEFINED.findall(code) if any(re.search(rf"\b{name}\b", test) for test in tests)]
    if not names:
        raise DataError(f"{row.origin}: column 'code' defines no function that the tests call")
    shows = {
        "text": _lines(text_cell(row, column)),
        "function": names[0],
        "first_test": _lines(tests[0]),
        "tests": _lines("\n".join(tests)),
    }
    gives = {**_solution(row, "code"), **_identity(row, "task_id")}
    return _Problem(gives=gives, uses=("text", "prompt", "code", "task_id"), shows=shows)


def _countdown(row: Row) -> _Problem:
    numbers, target = cell(row, "nums"), cell(row, "target")
    whole = isinstance(numbers, list | tuple) and numbers and all(_is_whole(number) for number in numbers)
    if not whole or not _is_whole(target):
        raise DataError(
            f"{row.origin}: countdown wants whole numbers, a list 'nums' and one 'target', got {describe(numbers)} and "
            f"{describe(target)}"
        )
    shows = {"numbers": ", ".join(map(str, numbers))}
    return _Problem(gives=_solution(row, "solution"), uses=("solution",), shows=shows)


def _areal_math(row: Row) -> _Problem:
    _of_task(row, "math")
    text_cell(row, "prompt")
    answers = [last_boxed(each) or each.strip() for each in _texts(row, "solutions")]
    if not all(answers):
        raise DataError(f"{row.origin}: a text of column 'solutions' is empty; an answer cannot be compared with it")
    gives = {"answer": answers[0], "answers": answers, **_identity(row, "query_id")}
    return _Problem(gives=gives, uses=("query_id", "solutions", "task"))


def _areal_code(row: Row) -> _Problem:
    _of_task(row, "code")
    text_cell(row, "prompt" if "prompt" in row.values else "question")
    cases = _cases(row)
    solutions = row.values.get("solutions") or ()
    response = {"response": solutions[0]} if solutions and isinstance(solutions[0], str) else {}
    gives = {"input_output": cases, **response, **_identity(row, "query_id" if "query_id" in row.values else "id")}
    shows = {"prompt": str(row.values.get("prompt", row.values.get("question")))}
    return _Problem(gives=gives, uses=("query_id", "question", "solutions", "task"), shows=shows)


def _cases(row: Row) -> dict[str, Any]:
    """The input and output pairs, which AReaL writes as JSON within JSON."""
    given = cell(row, "input_output")
    try:
        cases = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:  # also integers with too many digits
        raise DataError(f"{row.origin}: column 'input_output' is not JSON: {error}") from error
    given = [cases.get(key) for key in ("inputs", "outputs")] if isinstance(cases, dict) else []
    counts = [len(each) for each in given if isinstance(each, list)]
    if len(counts) != 2 or counts[0] != counts[1] or not counts[0]:
        raise DataError(
            f"{row.origin}: column 'input_output' must hold lists inputs and outputs, equally many and at least one, "
            f"got {describe(cases)} of {' and '.join(map(str, counts)) or 'no'} entries"
        )
    return cases


def _texts(row: Row, column: str) -> list[str]:
    texts = cell(row, column)
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{row.origin}: column '{column}' must be a list of texts, not empty, got {describe(texts)}")
    return list(texts)


def _of_task(row: Row, task: str) -> None:
    given = row.values.get("task", task)
    if given != task:
        raise DataError(f"{row.origin}: a row of task {given!r:.40} in a source of {task}; give each task its own file")


def _identity(row: Row, column: str) -> dict[str, str]:
    """The data set's number of a problem as id, unless the row has an id; {} if there is none."""
    value = row.values.get(column)
    return {} if value is None or "id" in row.values else {"id": str(value)}


def _solution(row: Row, column: str) -> dict[str, str]:
    return {"response": _lines(text_cell(row, column))} if row.values.get(column) is not None else {}


def _lines(text: str) -> str:
    """The text with "\\n" as line ends; MBPP has those of DOS."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_FORMS: dict[Problems, tuple[Callable[[Row], _Problem], str]] = {
    "gsm8k": (_gsm8k, "{question}\nThink step by step, then write the final number after ####."),
    "math": (_math, "{problem}\nThink step by step, and put the final answer within \\boxed{{}}."),
    "humaneval": (_humaneval, "{prompt}"),
    "mbpp": (
        _mbpp,
        "{text}\nThe function is called {function} and must pass this test:\n{first_test}\n"
        "Answer with the function in one block of Python code.",
    ),
    "countdown": (
        _countdown,
        "Use each of the numbers {numbers} exactly once, with + - * / and brackets, to make {target}.",
    ),
    "areal_math": (_areal_math, "{prompt}"),
    "areal_code": (_areal_code, "{prompt}"),
}
"""For each data set, the function that reads a row and the default template of the prompt."""
