"""A penalty for responses that repeat themselves: n-grams that came before, and blocks written again and again."""

from collections.abc import Sequence
from typing import Literal

from proximo.enums import ScoreState
from proximo.rewards.verifier import Answer, Grade, Verifier


class RepetitionVerifier(Verifier):
    """score = -(1 - different n-grams / n-grams), from 0 where none comes twice to nearly -1.

    -1 where a block of up to `ngram` units stands more than `longest_run` times in a row. Units are words (what blanks
    separate) or characters, for languages without blanks.
    """

    def __init__(
        self, *, unit: Literal["words", "characters"] = "words", ngram: int = 4, longest_run: int | None = None
    ) -> None:
        self.unit = unit
        self.ngram = ngram
        self.longest_run = longest_run

    def grade(self, answer: Answer) -> Grade:
        """`components`: `repeated_share` and `longest_run`."""
        units: Sequence[str] = answer.text.split() if self.unit == "words" else answer.text
        share, run = repeated_share(units, self.ngram), longest_run(units, self.ngram)
        components = {"repeated_share": share, "longest_run": float(run)}
        if self.longest_run is not None and run > self.longest_run:
            reason = f"a block repeated {run} times in a row"
            return Grade(score=-1.0, state=ScoreState.MODEL_FAULT, reason=reason, components=components)
        return Grade(score=0.0 - share, components=components)  # 0.0 - 0.0 is 0.0, and -0.0 reads badly

    def timeout_grade(self) -> Grade:
        """What an answer gets that the worker was killed over."""
        components = {"repeated_share": 0.0, "longest_run": 0.0}
        return Grade(score=-1.0, state=ScoreState.MODEL_FAULT, components=components)


def repeated_share(units: Sequence[str], n: int) -> float:
    """1 - different n-grams / n-grams: the share of n-grams that came before. 0 for fewer than n units."""
    count = len(units) - n + 1
    if count < 1:
        return 0.0
    return 1 - len({tuple(units[i : i + n]) for i in range(count)}) / count


def longest_run(units: Sequence[str], longest_block: int) -> int:
    """How often in a row a block of 1 to `longest_block` units is written, at most; 0 for no units, else at least 1.

    "a b a b a b c" has a run of 3, of the block "a b". A block of p units repeats for as long as each unit equals the
    one p before it.
    """
    longest = min(1, len(units))
    for period in range(1, longest_block + 1):
        equal = 0
        for i in range(period, len(units)):
            equal = equal + 1 if units[i] == units[i - period] else 0
            longest = max(longest, equal // period + 1)
    return longest
