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
MATCH_SECONDS = 1.0
"""Processor time of the search for a pattern."""
FORMAT_BONUS = 0.2
"""What an incorrect answer in the right form scores above one in another form."""
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
    """Scores `match_score` for a text in which `pattern` matches, else `no_match_score`.

    The `regex` package accepts Python's expressions and more, and supports a timeout: after MATCH_SECONDS of processor
    time the answer is at fault and gets the lower of the two scores, so that hiding a penalised match never pays.
    """

    def __init__(self, *, pattern: str, match_score: float = 1.0, no_match_score: float = 0.0) -> None:
        """Raises ConfigError if `pattern` is not a regular expression."""
        if problem := pattern_problem(pattern):
            raise ConfigError(problem)
        self.pattern = regex.compile(pattern)
        self.match_score = match_score
        self.no_match_score = no_match_score

    def grade(self, answer: Answer) -> Grade:
        """The grade, without components."""
        try:
            found = self.pattern.search(answer.text, timeout=MATCH_SECONDS)
        except TimeoutError:
            return replace(self.timeout_grade(), reason=f"the pattern took more than {MATCH_SECONDS:g} s")
        return Grade(score=self.no_match_score if found is None else self.match_score)

    def timeout_grade(self) -> Grade:
        """The grade of an answer that took too long: the lower score."""
        return Grade(score=min(self.no_match_score, self.match_score), state=ScoreState.MODEL_FAULT)


class RepetitionVerifier(Verifier):
    """score = -(1 - distinct n-grams / n-grams): from 0 without repetition down to nearly -1.

    Units are words, separated by white space, or characters for languages without spaces.
    """

    def __init__(self, *, unit: Literal["words", "characters"] = "words", ngram: int = 4) -> None:
        self.unit = unit
        self.ngram = ngram

    def grade(self, answer: Answer) -> Grade:
        """The grade; never -0.0."""
        units: Sequence[str] = answer.text.split() if self.unit == "words" else answer.text
        return Grade(score=0.0 - repeated_share(units, self.ngram))

    def timeout_grade(self) -> Grade:
        """The grade of an answer that took too long: -1."""
        return Grade(score=-1.0, state=ScoreState.MODEL_FAULT)


def repeated_share(units: Sequence[str], n: int) -> float:
    """1 - distinct n-grams / n-grams: the fraction of n-grams that occurred earlier. 0 for fewer than n units."""
    count = len(units) - n + 1
    if count < 1:
        return 0.0
    return 1 - len({tuple(units[i : i + n]) for i in range(count)}) / count


class ThinkAnswerVerifier(Verifier):
    """Scores the form of a response; with a verifier, the form of incorrect answers only.

    | | without a verifier | verifier: correct | verifier: incorrect |
    |---|---|---|---|
    | well-formed | 1 | 1 | `min_score` + 0.2 |
    | malformed | `min_score` | 1 | `min_score` |

    With a `min_score` of -1 the table is AReaL's: 1, -0.8, -1. An answer is correct if the verifier, which reads the
    whole response, scores it 1 or more. With `think_in_prompt` the prompt ends in `<think>`, so the response begins
    inside the thought.
    """

    def __init__(
        self,
        *,
        verifier: Mapping[str, Any] | None = None,
        min_score: float = 0.0,
        think_in_prompt: bool = False,
    ) -> None:
        self.verifier = None if verifier is None else _verifier(verifier)
        self.min_score = min_score
        self.think_in_prompt = think_in_prompt

    def grade(self, answer: Answer) -> Grade:
        """`components`: `well_formed`, and with a verifier `correct` and the verifier's own as `verifier.NAME`."""
        problem = form_problem(answer.text, think_in_prompt=self.think_in_prompt)
        well_formed = float(problem is None)
        state, reason = (ScoreState.SCORED, None) if problem is None else (ScoreState.MODEL_FAULT, problem)
        if self.verifier is None:
            score = 1.0 if problem is None else self.min_score
            return Grade(score=score, state=state, reason=reason, components={"well_formed": well_formed})
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
        score = self.min_score + FORMAT_BONUS * well_formed
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


def form_problem(text: str, *, think_in_prompt: bool = False) -> str | None:
    """Why a text is malformed, or None.

    A well-formed text has each of the four tags once, in order, and nothing but blanks before, between and after the
    two elements. Other tags, such as `<b>` or the `<` in `a < b`, are text.
    """
    text = ("<think>" + text if think_in_prompt else text).strip()
    tags = TAGS.findall(text)
    if tags != WELL_FORMED:
        missing = [tag for tag in WELL_FORMED if tag not in tags]
        return f"no {missing[0]}" if missing else "tags repeated or out of order"
    before, thought = text.split("<think>")
    between, answered = thought.split("</think>")[1].split("<answer>")
    if before or between.strip() or answered.split("</answer>")[1]:
        return "text outside of think and answer"
    return None


def _verifier(named: Mapping[str, Any]) -> Verifier:
    """Makes the nested verifier from its import path, which comes from the project's own configuration, and options."""
    module, _, name = named["verifier"].partition(":")
    verifier: Verifier = getattr(importlib.import_module(module), name)(**named["options"])
    return verifier
