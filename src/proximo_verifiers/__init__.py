"""Verifiers of model-written mathematics and programs, for any trainer. Imports no torch and nothing of `proximo`.

`maths/` compares answers, `code/` tests programs in `sandbox/`, `workers/` are the processes that both run in.
`verifier.py` is the interface of a verifier, `grader.py` grades answers in workers, and `trainers.py` makes reward
functions of a grader. Importing the package loads nothing: a worker starts in about a tenth of a second.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proximo_verifiers.code.verifier import CodeVerifier
    from proximo_verifiers.errors import (
        ConfigError,
        DataError,
        MissingExtraError,
        SandboxError,
        VerifierError,
        WorkersError,
    )
    from proximo_verifiers.grader import Grader
    from proximo_verifiers.maths.countdown import CountdownVerifier
    from proximo_verifiers.maths.verifier import MathsVerifier
    from proximo_verifiers.trainers import trl_reward, verl_score
    from proximo_verifiers.verifier import Answer, Finish, Grade, ScoreState, Verifier

_HOMES = {
    "code.verifier": ("CodeVerifier",),
    "errors": ("ConfigError", "DataError", "MissingExtraError", "SandboxError", "VerifierError", "WorkersError"),
    "grader": ("Grader",),
    "maths.countdown": ("CountdownVerifier",),
    "maths.verifier": ("MathsVerifier",),
    "trainers": ("trl_reward", "verl_score"),
    "verifier": ("Answer", "Finish", "Grade", "ScoreState", "Verifier"),
}
"""The modules of the public names."""

__all__ = [
    "Answer",
    "CodeVerifier",
    "ConfigError",
    "CountdownVerifier",
    "DataError",
    "Finish",
    "Grade",
    "Grader",
    "MathsVerifier",
    "MissingExtraError",
    "SandboxError",
    "ScoreState",
    "Verifier",
    "VerifierError",
    "WorkersError",
    "trl_reward",
    "verl_score",
]


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no public name {name!r}; it has {', '.join(__all__)}")
