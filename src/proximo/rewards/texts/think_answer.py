"""Whether a response has the form `<think>…</think><answer>…</answer>`, alone or with a verifier of the answer."""

import importlib
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from proximo_verifiers.verifier import Answer, Grade, ScoreState, Verifier

TAGS = re.compile(r"</?(?:think|answer)>")
WELL_FORMED = ["<think>", "</think>", "<answer>", "</answer>"]


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
