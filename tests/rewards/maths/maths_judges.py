"""Judges of mathematics for tests, with the defaults of their configuration."""

from collections.abc import Mapping
from typing import Any

from proximo.config.rewards.maths import CountdownRewardConfig, MathsRewardConfig
from proximo.rewards.maths.countdown import CountdownJudge
from proximo.rewards.maths.judge import MathsJudge
from proximo.rewards.verdicts import Answer, Verdict


def maths_judge(**options: Any) -> MathsJudge:
    """Without math-verify, unless it is asked for."""
    return MathsJudge(**MathsRewardConfig(kind="maths", **({"symbolic": "never"} | options)).judge_options())


def countdown_judge(**options: Any) -> CountdownJudge:
    return CountdownJudge(**CountdownRewardConfig(kind="countdown", **options).judge_options())


def judged(text: str, reference: str | None, *, metadata: Mapping[str, Any] | None = None, **options: Any) -> Verdict:
    asked = Answer(text=text, prompt="", reference=reference, metadata=metadata or {})
    return maths_judge(**options).judge(asked)
