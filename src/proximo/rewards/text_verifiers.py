"""The verifiers of the form of a text: length, regular expressions, repetition, and the tags of thought and answer.

(DAPO's penalty for overlong responses is part of ppo.score.)
"""

import importlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import regex

from proximo.config.rewards.text_rules import pattern_problem
from proximo.errors import ConfigError
from proximo_verifiers.verifier import Answer, Grade, ScoreState, Verifier

Unit = Literal["tokens", "words", "characters"]
TAGS = re.compile(r"</?(?:think|answer)>")
WELL_FORMED = ["<think>", "</think>", "<answer>", "</answer>"]


class LengthVerifier(Verifier):
    """score = max(0, 1 - distance / `slack`), where distance is the number of units outside `shortest` to `longest`.

    Both ends are inclusive. With a slack of 0 the score outside the range is 0. Words are separated by white space.
    Tokens include the end-of-sequence token.
    """

    def __init__(
        self, *, unit: Unit = "words", shortest: int | None = None, longest: int | None = None, slack: int = 0
    ) -> None:
        self.unit = unit
        self.shortest = shortest
        self.longest = longest
        self.slack = slack

    def grade(self, answer: Answer) -> Grade:
        """The grade, with the component `length` in units."""
        length = measured(answer, self.unit)
        too_short = 0 if self.shortest is None else max(0, self.shortest - length)
        too_long = 0 if self.longest is None else max(0, length - self.longest)
        distance = too_short + too_long  # at most one is not 0
        score = max(0.0, 1 - distance / self.slack) if self.slack else float(distance == 0)
        return Grade(score=score, components={"length": float(length)})

    def timeout_grade(self) -> Grade:
        """The grade of an answer that took too long: 0."""
        return Grade(score=0.0, state=ScoreState.MODEL_FAULT, components={"length": 0.0})


def measured(answer: Answer, unit: Unit) -> int:
    """The length of a response in units."""
    match unit:
        case "tokens":
            return answer.num_tokens
        case "words":
            return len(answer.text.split())
        case "characters":
            return len(answer.text)


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


class ThinkAnswerVerifier(Verifier):
    """Scores the form of a response; with a verifier, the form of incorrect answers only.

    | | without a verifier | verifier: correct | verifier: incorrect |
    |---|---|---|---|
    | well-formed | 1 | 1 | `min_score` + `format_bonus` |
    | malformed | `min_score` | 1 | `min_score` |

    With a `min_score` of -1 and a bonus of 0.2 the table is AReaL's: 1, -0.8, -1. An answer is correct if the verifier
    scores it 1 or more.

    With `think_in_prompt` the prompt ends in `<think>`, so the response begins inside the thought. `verifier_input`
    sets what the verifier reads: the whole response, or the text between the answer tags. Of a malformed response it
    always reads the whole.
    """

    def __init__(
        self,
        *,
        verifier: Mapping[str, Any] | None = None,
        verifier_input: Literal["response", "answer"] = "response",
        format_bonus: float | None = None,
        min_score: float = 0.0,
        think_in_prompt: bool = False,
    ) -> None:
        self.verifier = None if verifier is None else _verifier(verifier)
        self.verifier_input = verifier_input
        self.format_bonus = 0.2 if format_bonus is None else format_bonus
        self.min_score = min_score
        self.think_in_prompt = think_in_prompt

    def grade(self, answer: Answer) -> Grade:
        """`components`: `well_formed`, and with a verifier `correct` and the verifier's own as `verifier.NAME`."""
        problem, inside = read_form(answer.text, think_in_prompt=self.think_in_prompt)
        well_formed = float(problem is None)
        state, reason = (ScoreState.SCORED, None) if problem is None else (ScoreState.MODEL_FAULT, problem)
        if self.verifier is None:
            score = 1.0 if problem is None else self.min_score
            return Grade(score=score, state=state, reason=reason, components={"well_formed": well_formed})
        if self.verifier_input == "answer" and inside is not None:
            answer = replace(answer, text=inside)
        inner = self.verifier.grade(answer)
        if not inner.state.has_score:
            return replace(inner, score=math.nan)
        correct = inner.score >= 1
        named = {f"verifier.{name}": value for name, value in inner.components.items()}
        components = {"well_formed": well_formed, "correct": float(correct), **named}
        if correct:
            return Grade(score=1.0, components=components, by_clock=inner.by_clock)
        if problem is None:
            state, reason = inner.state, inner.reason
        elif inner.reason is not None:
            reason = f"{problem}; {inner.reason}"
        score = self.min_score + self.format_bonus * well_formed
        return Grade(score=score, state=state, reason=reason, components=components, by_clock=inner.by_clock)

    def timeout_grade(self) -> Grade:
        """The grade of an answer that took too long: the lowest score, and 0 for every component."""
        names = ["well_formed"]
        if self.verifier is not None:
            theirs = getattr(self.verifier, "timeout_grade", None)
            names += ["correct", *(f"verifier.{name}" for name in (theirs().components if theirs else ()))]
        return Grade(score=self.min_score, state=ScoreState.MODEL_FAULT, components=dict.fromkeys(names, 0.0))

    def check_row(self, reference: str | None, metadata: Mapping[str, Any]) -> None:
        """Checks the row by the nested verifier, which may raise DataError."""
        if self.verifier is not None:
            self.verifier.check_row(reference, metadata)

    def close(self) -> None:
        """Closes the nested verifier."""
        if self.verifier is not None:
            self.verifier.close()


def read_form(text: str, *, think_in_prompt: bool = False) -> tuple[str | None, str | None]:
    """(problem of the form, text between the answer tags); one of the two is None.

    A well-formed text has each of the four tags once, in order, and nothing but blanks before, between and after the
    two elements. Other tags, such as `<b>` or the `<` in `a < b`, are text.
    """
    text = ("<think>" + text if think_in_prompt else text).strip()
    tags = TAGS.findall(text)
    if tags != WELL_FORMED:
        missing = [tag for tag in WELL_FORMED if tag not in tags]
        return (f"no {missing[0]}" if missing else "tags repeated or out of order"), None
    before, thought = text.split("<think>")
    between, inside = thought.split("</think>")[1].split("<answer>")
    inside, after = inside.split("</answer>")
    if before or between.strip() or after:
        return "text outside of think and answer", None
    return None, inside.strip()


def _verifier(named: Mapping[str, Any]) -> Verifier:
    """Makes the nested verifier from its import path, which comes from the project's own configuration, and options."""
    module, _, name = named["verifier"].partition(":")
    verifier: Verifier = getattr(importlib.import_module(module), name)(**named["options"])
    return verifier
