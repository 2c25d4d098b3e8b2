"""Says what a step of PPO is doing, call by call, and what to do where its memory runs out."""

import logging
from collections.abc import Generator
from contextlib import contextmanager

from proximo.run.memory import memory_advice

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
