"""Verifiers of mathematics for tests, with their defaults."""

from collections.abc import Mapping
from typing import Any

from proximo_verifiers.maths.countdown import CountdownVerifier
from proximo_verifiers.maths.verifier import MathsVerifier
from proximo_verifiers.verifier import Answer, Grade


def maths_verifier(**options: Any) -> MathsVerifier:
    """Without math-verify, unless it is asked for."""
    return MathsVerifier(**({"symbolic": "never"} | options))


def countdown_verifier(**options: Any) -> CountdownVerifier:
    return CountdownVerifier(**options)


def graded(text: str, reference: str | None, *, metadata: Mapping[str, Any] | None = None, **options: Any) -> Grade:
    asked = Answer(text=text, prompt="", reference=reference, metadata=metadata or {})
    return maths_verifier(**options).grade(asked)
