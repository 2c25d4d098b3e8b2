"""The verifier of mathematical answers: finds the answer in a response and compares it with the reference."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from proximo_verifiers.errors import DataError, check_choices
from proximo_verifiers.maths.cleaning import MAX_CHARACTERS, clean
from proximo_verifiers.maths.equivalence import equivalent
from proximo_verifiers.maths.extraction import PLACES, answers_in
from proximo_verifiers.maths.rational_functions import NotEvaluatedError
from proximo_verifiers.maths.symbols import OutOfTimeError, SymbolicComparison, is_installed
from proximo_verifiers.verifier import Answer, Grade, ScoreState

ANSWERS = "answers"
"""Column with a list of further reference answers; an answer that equals any reference is correct."""
MAX_BOXES = 20
"""Largest number of different answers that are compared with each other; more count as differing."""
MAX_REFERENCES = 100
"""Largest number of reference answers of a row."""


class MathsVerifier:
    """Compares the answer in a response with the references: exactly if both can be parsed, else symbolically."""

    def __init__(
        self,
        *,
        answer_from: Sequence[str] = ("boxed", "tags", "hash", "phrase"),
        multiple_answers: str = "last",
        pattern: str | None = None,
        relative_tolerance: float | None = None,
        symbolic: str = "auto",
        symbolic_cpu_seconds: float = 0.8,
        correct_score: float = 1.0,
        incorrect_score: float = 0.0,
        no_answer_score: float = 0.0,
    ) -> None:
        """`answer_from`: places to look for the answer, in order: `boxed` (\\boxed{}), `tags` (<answer>...</answer>),
        `hash` (after ####), `phrase` (after "the answer is"), `label` (a line `A: ...`), `number` (the last number),
        `pattern` (a match of `pattern`, a regular expression), `response` (all of it). `multiple_answers`: of several
        answers in one place the `last`, the `first`, or all, which must `agree`. `relative_tolerance`: of real numbers;
        None demands the exact value. `symbolic`: whether math-verify compares what the grammar cannot parse, `auto` (if
        it is installed), `always` or `never`, for at most `symbolic_cpu_seconds` per answer. A row may have further
        references in the column `answers`.

        Raises ConfigError for an unknown place or choice, MissingExtraError for `symbolic="always"` without
        math-verify.
        """
        check_choices("answer_from has no", answer_from, PLACES)
        check_choices("multiple_answers cannot be", [multiple_answers], ("last", "first", "agree"))
        check_choices("symbolic cannot be", [symbolic], ("auto", "always", "never"))
        self._answer_from = tuple(answer_from)
        self._multiple_answers = multiple_answers
        self._pattern = None if pattern is None else re.compile(pattern)
        self._tolerance = relative_tolerance
        use_symbols = symbolic == "always" or (symbolic == "auto" and is_installed())
        self._symbols = SymbolicComparison(symbolic_cpu_seconds) if use_symbols else None
        self._scores = {"correct": correct_score, "incorrect": incorrect_score, "no_answer": no_answer_score}

    def grade(self, answer: Answer) -> Grade:
        """The grade, with the components `parsed`, `by_symbols` and `undecided`, each 0 or 1.

        They say that an answer was found, that math-verify decided, and that no comparison was possible.
        """
        references = self._references(answer.reference, answer.metadata)
        answers = answers_in(answer.text, self._answer_from, self._pattern)
        if not answers:
            return self._fault("no answer found", parsed=0.0)
        try:
            if self._multiple_answers == "agree" and not self._agree(answers):
                return self._fault("several answers that differ", parsed=1.0)
            chosen = answers[0] if self._multiple_answers == "first" else answers[-1]
            same, by_symbols = self._same(references, chosen)
        except NotEvaluatedError as error:
            return self._fault(f"{error}", parsed=1.0, score="incorrect")
        except OutOfTimeError:
            return self._fault("math-verify took too long to compare it", parsed=1.0, by_symbols=1.0, score="incorrect")
        return Grade(
            score=self._scores["correct" if same else "incorrect"],
            components=_components(1.0, float(by_symbols), float(same is None)),
        )

    def check_row(self, reference: str | None, metadata: Mapping[str, Any]) -> None:
        """Raises DataError for a row without reference answers, or with too many, too long or empty ones."""
        references = self._references(reference, metadata)
        if len(references) > MAX_REFERENCES:
            raise DataError(f"{len(references)} reference answers, but the limit is {MAX_REFERENCES}")
        for text in references:
            if len(text) > MAX_CHARACTERS:
                raise DataError(
                    f"a reference answer has {len(text)} characters, but the limit is {MAX_CHARACTERS}: give "
                    f"the answer alone, not the solution; it begins with {text[:40]!r}"
                )
            if not clean(text):
                raise DataError(f"the reference answer {text!r} is empty after cleaning")

    def timeout_grade(self) -> Grade:
        """The grade of an answer that took too long, as it may with a pattern of the user."""
        return self._fault("grading it took too long", parsed=0.0, score="incorrect")

    def close(self) -> None:
        """Does nothing: there is no process to end."""

    def _references(self, reference: str | None, metadata: Mapping[str, Any]) -> list[str]:
        """The distinct reference answers of a row: its own, and those in its list."""
        listed = metadata.get(ANSWERS)
        if listed is None:
            listed = []
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            raise DataError(
                f"column {ANSWERS!r} must be a list of reference answers as text, got {listed!r:.80}; rename a column "
                "that is something else"
            )
        own = [] if reference is None else [reference]
        if not own and not listed:
            raise DataError("a maths reward needs a reference answer, but the row has none (column `answer`)")
        return list(dict.fromkeys(own + listed))

    def _agree(self, answers: Sequence[str]) -> bool:
        different = sorted(set(answers))
        return len(different) <= MAX_BOXES and all(self._same(different[:1], other)[0] for other in different[1:])

    def _same(self, references: Sequence[str], answer: str) -> tuple[bool | None, bool]:
        """(whether the answer equals a reference, None if unknown; whether math-verify decided).

        Raises NotEvaluatedError if it equals none and could not be evaluated.
        """
        undecided, refused = [], None
        for reference in references:
            try:
                same = equivalent(reference, answer, relative_tolerance=self._tolerance)
            except NotEvaluatedError as error:
                refused = error
                continue
            if same:
                return True, False
            if same is None:
                undecided.append(reference)
        decision = self._symbols.any_same(undecided, answer) if self._symbols and undecided else None
        if not decision and refused is not None:
            raise refused
        return (decision, decision is not None) if undecided else (False, False)

    def _fault(self, reason: str, *, parsed: float, by_symbols: float = 0.0, score: str = "no_answer") -> Grade:
        return Grade(
            score=self._scores[score],
            state=ScoreState.MODEL_FAULT,
            reason=reason,
            components=_components(parsed, by_symbols, 0.0),
        )


def _components(parsed: float, by_symbols: float, undecided: float) -> dict[str, float]:
    return {"parsed": parsed, "by_symbols": by_symbols, "undecided": undecided}
