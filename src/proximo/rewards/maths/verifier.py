"""The verifier of mathematical answers: finds the answer in a response and compares it with the reference."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from proximo.enums import ScoreState
from proximo.errors import DataError
from proximo.rewards.maths.cleaning import MAX_CHARACTERS, clean
from proximo.rewards.maths.equivalence import equivalent
from proximo.rewards.maths.extraction import answers_in
from proximo.rewards.maths.rational_functions import RefusedError
from proximo.rewards.maths.symbols import OutOfTimeError, SymbolicComparison, is_installed
from proximo.rewards.verifier import Answer, Grade

MAX_BOXES = 20
"""More boxes than this never agree."""
MAX_REFERENCES = 100
"""Of one row; each is compared with."""


class MathsVerifier:
    """Takes the answer out of a response and compares it with the reference, exactly where it can be read."""

    def __init__(  # noqa: PLR0913 - one for each key of its section
        self,
        *,
        answer_from: Sequence[str],
        answers_column: str | None,
        multiple_answers: str,
        pattern: str | None,
        relative_tolerance: float | None,
        symbolic: str,
        symbolic_cpu_seconds: float,
        correct_score: float,
        incorrect_score: float,
        no_answer_score: float,
    ) -> None:
        """The options are the fields of config/rewards/maths.py. Raises MissingExtraError."""
        self._answer_from = tuple(answer_from)
        self._answers_column = answers_column
        self._multiple_answers = multiple_answers
        self._pattern = None if pattern is None else re.compile(pattern)
        self._tolerance = relative_tolerance
        asked = symbolic == "always" or (symbolic == "auto" and is_installed())
        self._symbols = SymbolicComparison(symbolic_cpu_seconds) if asked else None
        self._scores = {"correct": correct_score, "incorrect": incorrect_score, "no_answer": no_answer_score}

    def grade(self, answer: Answer) -> Grade:
        """The grade; components `parsed` (an answer was found), `by_symbols` and `undecided` (who decided)."""
        references = self._references(answer.reference, answer.metadata)
        found = answers_in(answer.text, self._answer_from, self._pattern)
        if not found:
            return self._fault("no answer found", parsed=0.0)
        try:
            if self._multiple_answers == "agree" and not self._agree(found):
                return self._fault("several answers that differ", parsed=1.0)
            given = found[0] if self._multiple_answers == "first" else found[-1]
            same, by_symbols = self._same(references, given)
        except RefusedError as error:
            return self._fault(f"{error}", parsed=1.0, score="incorrect")
        except OutOfTimeError:
            return self._fault("math-verify took too long to compare it", parsed=1.0, by_symbols=1.0, score="incorrect")
        return Grade(
            score=self._scores["correct" if same else "incorrect"],
            components=_components(1.0, float(by_symbols), float(same is None)),
        )

    def check_row(self, reference: str | None, metadata: Mapping[str, Any]) -> None:
        """Reference answers are needed, of at most MAX_CHARACTERS characters, with something in each to compare."""
        references = self._references(reference, metadata)
        if len(references) > MAX_REFERENCES:
            raise DataError(f"{len(references)} reference answers, at most {MAX_REFERENCES} are compared with")
        for each in references:
            if len(each) > MAX_CHARACTERS:
                raise DataError(
                    f"a reference answer of {len(each)} characters, at most {MAX_CHARACTERS} are read: it is to be "
                    f"the answer alone, not the solution; it begins with {each[:40]!r}"
                )
            if not clean(each):
                raise DataError(f"the reference answer {each!r} has nothing in it to compare with")

    def timeout_grade(self) -> Grade:
        """Of an answer on which the worker was killed: a pattern of the user's own may take that long."""
        return self._fault("grading it took too long", parsed=0.0, score="incorrect")

    def close(self) -> None:
        """Nothing was started."""

    def _references(self, reference: str | None, metadata: Mapping[str, Any]) -> list[str]:
        """The row's own, and those of its list; each once."""
        column = self._answers_column
        listed = None if column is None else metadata.get(column)
        if listed is None:
            listed = []
        if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
            raise DataError(
                f"column {column!r} must be a list of texts, the reference answers, got {listed!r:.80}; answers_column "
                "names another column, and null none"
            )
        own = [] if reference is None else [reference]
        if not own and not listed:
            raise DataError("a maths reward needs a reference answer; the row has none (column `answer`)")
        return list(dict.fromkeys(own + listed))

    def _agree(self, found: Sequence[str]) -> bool:
        different = sorted(set(found))
        return len(different) <= MAX_BOXES and all(self._same(different[:1], other)[0] for other in different[1:])

    def _same(self, references: Sequence[str], given: str) -> tuple[bool | None, bool]:
        """Whether it is one of them, where that is known, and whether math-verify said so.

        Raises RefusedError where it is none of them and cannot be compared with some.
        """
        undecided, refused = [], None
        for reference in references:
            try:
                same = equivalent(reference, given, relative_tolerance=self._tolerance)
            except RefusedError as error:
                refused = error
                continue
            if same:
                return True, False
            if same is None:
                undecided.append(reference)
        found = self._symbols.any_same(undecided, given) if self._symbols and undecided else None
        if not found and refused is not None:
            raise refused
        return (found, found is not None) if undecided else (False, False)

    def _fault(self, reason: str, *, parsed: float, by_symbols: float = 0.0, score: str = "no_answer") -> Grade:
        return Grade(
            score=self._scores[score],
            state=ScoreState.MODEL_FAULT,
            reason=reason,
            components=_components(parsed, by_symbols, 0.0),
        )


def _components(parsed: float, by_symbols: float, undecided: float) -> dict[str, float]:
    return {"parsed": parsed, "by_symbols": by_symbols, "undecided": undecided}
