"""Whether a response has the form `<think>…</think><answer>…</answer>`, alone or beside a verifier of what it says."""

import importlib
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from proximo.enums import ScoreState
from proximo.rewards.verdicts import Answer, Judge, Verdict

TAGS = re.compile(r"</?(?:think|answer)>")
WELL_FORMED = ["<think>", "</think>", "<answer>", "</answer>"]


class ThinkAnswerJudge(Judge):
    """Scores the form; where there is a verifier, the form only where the answer is wrong.

    | | without a verifier | verifier says right | verifier says wrong |
    |---|---|---|---|
    | well-formed | 1 | 1 | floor + `well_formed_credit` |
    | malformed | floor | 1 | floor |

    floor is -1 with `zero_as_minus_one`, else 0. With -1 and a credit of 0.2 the table is AReaL's: 1, -0.8, -1. An
    answer is right where the verifier's score is 1 or more.

    `opened_by_prompt`: the prompt's text ends in `<think>`, so the response begins behind it. `right_reads` says what
    the verifier is shown: the whole response, or what stands between the answer tags (the whole of a malformed one).
    """

    def __init__(
        self,
        *,
        right: Mapping[str, Any] | None = None,
        right_reads: Literal["response", "answer"] = "response",
        well_formed_credit: float | None = None,
        zero_as_minus_one: bool = False,
        opened_by_prompt: bool = False,
    ) -> None:
        self.verifier = None if right is None else _judge(right)
        self.right_reads = right_reads
        self.credit = 0.2 if well_formed_credit is None else well_formed_credit
        self.floor = -1.0 if zero_as_minus_one else 0.0
        self.opened_by_prompt = opened_by_prompt

    def judge(self, answer: Answer) -> Verdict:
        """`components`: `well_formed`, and with a verifier `right` and the verifier's own as `right.NAME`."""
        problem, inside = read_form(answer.text, opened_by_prompt=self.opened_by_prompt)
        well_formed = float(problem is None)
        state, reason = (ScoreState.SCORED, None) if problem is None else (ScoreState.MODEL_FAULT, problem)
        if self.verifier is None:
            score = 1.0 if problem is None else self.floor
            return Verdict(score=score, state=state, reason=reason, components={"well_formed": well_formed})
        if self.right_reads == "answer" and inside is not None:
            answer = replace(answer, text=inside)
        found = self.verifier.judge(answer)
        if found.state is ScoreState.INFRASTRUCTURE_FAULT:
            return replace(found, score=math.nan)
        right = found.score >= 1
        named = {f"right.{name}": value for name, value in found.components.items()}
        components = {"well_formed": well_formed, "right": float(right), **named}
        if right:
            return Verdict(score=1.0, components=components, by_clock=found.by_clock)
        if problem is None:
            state, reason = found.state, found.reason
        elif found.reason is not None:
            reason = f"{problem}; {found.reason}"
        score = self.floor + self.credit * well_formed
        return Verdict(score=score, state=state, reason=reason, components=components, by_clock=found.by_clock)

    def timeout_verdict(self) -> Verdict:
        """What an answer gets that the worker was killed over: the floor, and 0 for every part."""
        names = ["well_formed"]
        if self.verifier is not None:
            theirs = getattr(self.verifier, "timeout_verdict", None)
            names += ["right", *(f"right.{name}" for name in (theirs().components if theirs else ()))]
        return Verdict(score=self.floor, state=ScoreState.MODEL_FAULT, components=dict.fromkeys(names, 0.0))

    def check_row(self, reference: str | None, metadata: Mapping[str, Any]) -> None:
        """As the verifier."""
        if self.verifier is not None:
            self.verifier.check_row(reference, metadata)

    def close(self) -> None:
        """As the verifier."""
        if self.verifier is not None:
            self.verifier.close()


def read_form(text: str, *, opened_by_prompt: bool = False) -> tuple[str | None, str | None]:
    """(what is wrong with the form, what stands between the answer tags): one of the two is None.

    Well-formed: each of the four tags once, in their order, and nothing but blanks before, between and after the two
    elements. Other tags, `<b>` or `a < b`, are text.
    """
    text = ("<think>" + text if opened_by_prompt else text).strip()
    found = TAGS.findall(text)
    if found != WELL_FORMED:
        missing = [tag for tag in WELL_FORMED if tag not in found]
        return (f"no {missing[0]}" if missing else "tags repeated or out of order"), None
    before, thought = text.split("<think>")
    between, inside = thought.split("</think>")[1].split("<answer>")
    inside, after = inside.split("</answer>")
    if before or between.strip() or after:
        return "text outside of think and answer", None
    return None, inside.strip()


def _judge(named: Mapping[str, Any]) -> Judge:
    """The judge of the verifier, from its import path (of the project's own configuration) and options."""
    module, _, name = named["judge"].partition(":")
    judge: Judge = getattr(importlib.import_module(module), name)(**named["options"])
    return judge
