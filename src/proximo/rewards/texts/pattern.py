"""The verifier of regular expressions, with a time limit for each search."""

from dataclasses import replace
from typing import Literal

import regex

from proximo.config.rewards.text_rules import pattern_problem
from proximo.errors import ConfigError
from proximo_verifiers.verifier import Answer, Grade, ScoreState, Verifier


class PatternVerifier(Verifier):
    """score = `match_score` * min(matches, `max_matches`), or `no_match_score` without a match.

    Matches do not overlap. With `match="full"` the whole response must match. The `regex` package accepts Python's
    expressions and more, and supports a timeout: after `match_seconds` of processor time the answer is at fault and
    gets the lowest possible score.
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
        """Raises ConfigError if `pattern` is not a regular expression."""
        if problem := pattern_problem(pattern):
            raise ConfigError(problem)
        self.pattern = regex.compile(pattern)
        self.match = match
        self.max_matches = max_matches
        self.match_score = match_score
        self.no_match_score = no_match_score
        self.match_seconds = match_seconds

    def grade(self, answer: Answer) -> Grade:
        """The grade, with the component `matches`, which is at most `max_matches`."""
        try:
            matches = self._matches(answer.text)
        except TimeoutError:
            return replace(self.timeout_grade(), reason=f"the pattern took more than {self.match_seconds:g} s")
        score = self.match_score * matches if matches else self.no_match_score
        return Grade(score=score, components={"matches": float(matches)})

    def timeout_grade(self) -> Grade:
        """The grade of an answer that took too long: the lowest score, so that hiding penalised matches never pays."""
        lowest = min(self.no_match_score, self.match_score, self.match_score * self.max_matches)
        return Grade(score=lowest, state=ScoreState.MODEL_FAULT, components={"matches": 0.0})

    def _matches(self, text: str) -> int:
        if self.match == "full":
            return int(self.pattern.fullmatch(text, timeout=self.match_seconds) is not None)
        # The timeout of finditer covers all matches, counted from the start of the search.
        matches = self.pattern.finditer(text, timeout=self.match_seconds)
        return sum(1 for _ in zip(range(self.max_matches), matches, strict=False))
