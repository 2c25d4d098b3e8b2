"""The verifier of repetition: repeated n-grams, and blocks repeated in a row."""

from collections.abc import Sequence
from typing import Literal

from proximo_verifiers.verifier import Answer, Grade, ScoreState, Verifier


class RepetitionVerifier(Verifier):
    """score = -(1 - distinct n-grams / n-grams): from 0 without repetition down to nearly -1.

    The score is -1 if a block of up to `ngram` units occurs more than `longest_run` times in a row. Units are words,
    separated by white space, or characters for languages without spaces.
    """

    def __init__(
        self, *, unit: Literal["words", "characters"] = "words", ngram: int = 4, longest_run: int | None = None
    ) -> None:
        self.unit = unit
        self.ngram = ngram
        self.longest_run = longest_run

    def grade(self, answer: Answer) -> Grade:
        """The grade, with the components `repeated_share` and `longest_run`."""
        units: Sequence[str] = answer.text.split() if self.unit == "words" else answer.text
        share, run = repeated_share(units, self.ngram), longest_run(units, self.ngram)
        components = {"repeated_share": share, "longest_run": float(run)}
        if self.longest_run is not None and run > self.longest_run:
            reason = f"a block repeated {run} times in a row"
            return Grade(score=-1.0, state=ScoreState.MODEL_FAULT, reason=reason, components=components)
        return Grade(score=0.0 - share, components=components)  # subtraction avoids -0.0

    def timeout_grade(self) -> Grade:
        """The grade of an answer that took too long: -1."""
        components = {"repeated_share": 0.0, "longest_run": 0.0}
        return Grade(score=-1.0, state=ScoreState.MODEL_FAULT, components=components)


def repeated_share(units: Sequence[str], n: int) -> float:
    """1 - distinct n-grams / n-grams: the fraction of n-grams that occurred earlier. 0 for fewer than n units."""
    count = len(units) - n + 1
    if count < 1:
        return 0.0
    return 1 - len({tuple(units[i : i + n]) for i in range(count)}) / count


def longest_run(units: Sequence[str], longest_block: int) -> int:
    """The largest number of consecutive repetitions of a block of 1 to `longest_block` units; 0 for no units.

    "a b a b a b c" has a run of 3 of the block "a b". A block of p units repeats as long as each unit equals the one p
    positions before it.
    """
    longest = min(1, len(units))
    for period in range(1, longest_block + 1):
        equal = 0
        for i in range(period, len(units)):
            equal = equal + 1 if units[i] == units[i - period] else 0
            longest = max(longest, equal // period + 1)
    return longest
