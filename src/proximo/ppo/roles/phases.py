"""Says how far PPO is, what a step is doing, call by call, and what to do where its memory runs out."""

import logging
from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console

from proximo.metrics.console import ProgressInfo, ProgressView, open_progress
from proximo.run.memory import memory_advice
from proximo.trainer_kinds import TrainerKind, recipe_kind

LOG = logging.getLogger("proximo.ppo")
PHASES = {
    "generate": "sampling responses",
    "generate_greedy": "sampling the most likely responses",
    "score": "scoring responses",
    "reference_logprobs": "log-probs of the reference",
    "policy_logprobs": "log-probs of the policy",
    "policy_logprobs_and_values": "log-probs and values",
    "values": "values",
    "train_value": "training the value model",
    "train_policy": "training the policy",
    "train_policy_and_value": "training policy and value",
    "push_weights": "pushing weights",
}
"""Call -> what is shown while it runs; what takes no time is left out."""


@contextmanager
def phase(call: str, memory_settings: str, *, step: int) -> Generator[None]:
    """Around a call of a step: shown by the progress of a run, with `memory_advice`."""
    if call in PHASES:
        LOG.info(PHASES[call], extra={"phase": True})
    with memory_advice(memory_settings, call, step=step):
        yield


def notebook_progress(*, first_step: int, total_steps: int, quiet: bool) -> ProgressView:
    """The progress of PPO as a library: shown in a notebook alone."""
    console, kind = Console(stderr=True), recipe_kind("ppo")
    assert isinstance(kind, TrainerKind)
    info = ProgressInfo(trainer=kind, total_steps=total_steps, first_step=first_step)
    return open_progress(info, console=console, quiet=quiet or not console.is_jupyter)
