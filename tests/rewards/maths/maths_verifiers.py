"""Verifiers of mathematics for tests, with the defaults of their configuration."""

from collections.abc import Mapping
from typing import Any

from proximo.config.rewards.maths import CountdownRewardConfig, MathsRewardConfig
from proximo.rewards.maths.countdown import CountdownVerifier
from proximo.rewards.maths.verifier import MathsVerifier
from proximo.rewards.verifier import Answer, Grade


def maths_verifier(**options: Any) -> MathsVerifier:
    """Without math-verify, unless it is asked for."""
    return MathsVerifier(**MathsRewardConfig(kind="maths", **({"symbolic": "never"} | options)).verifier_options())


def countdown_verifier(**options: Any) -> CountdownVerifier:
    return CountdownVerifier(**CountdownRewardConfig(kind="countdown", **options).verifier_options())


def graded(text: str, reference: str | None, *, metadata: Mapping[str, Any] | None = None, **options: Any) -> Grade:
    asked = Answer(text=text, prompt="", reference=reference, metadata=metadata or {})
    return maths_verifier(**options).grade(asked)
