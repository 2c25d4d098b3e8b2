"""The verifiers of the form of a text: a regular expression, and the tags of thought and answer."""

import importlib
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import regex

from proximo_verifiers.verifier import Answer, Grade, ScoreState, Verifier

MATCH_SECONDS = 1.0
"""Processor time of the search for a pattern."""
FORMAT_BONUS = 0.2
"""What an incorrect answer in the right form scores above one in another form."""
TAGS = re.compile(r"</?(?:think|answer)>")
WELL_FORMED = ["<think>", "</think>", "<answer>", "</answer>"]


class PatternVerifier(Verifier):
    """Scores `match_score` for a text in which `pattern` matches, else `no_match_score`.

    The `regex` package accepts Python's expressions and more, and supports a timeout: after MATCH_SECONDS of processor
    time the answer is at fault and gets the lower of the two scores, so that hiding a penalised match never pays.
    """

    def __init__(self, *, pattern: str, match_score: float = 1.0, no_match_score: float = 0.0) -> None:
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
