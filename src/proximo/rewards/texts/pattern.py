"""Whether, or how often, a response matches a regular expression, within a limit of time that holds."""

from dataclasses import replace
from typing import Literal

import regex

from proximo.config.rewards.text_rules import pattern_problem
from proximo.enums import ScoreState
from proximo.errors import ConfigError
from proximo.rewards.verifier import Answer, Grade, Verifier


class PatternVerifier(Verifier):
    """score = `match_score` * min(matches, `max_matches`), and `no_match_score` where there is no match.

    Matches do not overlap; `full` asks that the whole response matches. Expressions are those of the `regex` module,
    which are Python's and more, and which can be told to give up: after `match_seconds` of processor time the answer
    is at fault and gets the lowest score that an answer can get.
    """

    def __init__(
        self,
        *,
        pattern: str,
        match: Literal["full", "search"] = "search",
        max_matches: int = 1,
        match_score: float = 1.0,
        no_match_score: float = 0.0,
        match_seconds: float = 1.0,
    ) -> None:
        """Raises ConfigError for what is no regular expression."""
        if problem := pattern_problem(pattern):
            raise ConfigError(problem)
        self.pattern = regex.compile(pattern)
        self.match = match
        self.max_matches = max_matches
        self.match_score = match_score
        self.no_match_score = no_match_score
        self.match_seconds = match_seconds

    def grade(self, answer: Answer) -> Grade:
        """`components`: `matches`, no more than `max_matches` of them."""
        try:
            matches = self._matches(answer.text)
        except TimeoutError:
            return replace(self.timeout_grade(), reason=f"the pattern took more than {self.match_seconds:g} s")
        score = self.match_score * matches if matches else self.no_match_score
        return Grade(score=score, components={"matches": float(matches)})

    def timeout_grade(self) -> Grade:
        """What an answer gets that took too long, lest it pay to hide matches that cost something."""
        lowest = min(self.no_match_score, self.match_score, self.match_score * self.max_matches)
        return Grade(score=lowest, state=ScoreState.MODEL_FAULT, components={"matches": 0.0})

    def _matches(self, text: str) -> int:
        if self.match == "full":
            return int(self.pattern.fullmatch(text, timeout=self.match_seconds) is not None)
        # One limit for all matches of a response: the module counts it from the start of the search.
        found = self.pattern.finditer(text, timeout=self.match_seconds)
        return sum(1 for _ in zip(range(self.max_matches), found, strict=False))
