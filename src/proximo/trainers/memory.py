"""What to say when memory runs out: in which step and phase, and which settings to lower. Frees nothing."""

from collections.abc import Generator
from contextlib import contextmanager

import torch

from proximo.errors import TrainingError
from proximo.metrics.trainers import Trainer

SETTINGS = {
    Trainer.SFT: "lower sft.tokens_per_microbatch, or set model.activation_checkpointing",
    Trainer.REWARD: "lower reward.tokens_per_microbatch, or set model.activation_checkpointing",
    Trainer.DPO: "lower dpo.tokens_per_microbatch, or set model.activation_checkpointing",
    Trainer.PPO: "lower ppo.tokens_per_microbatch or, for a rollout, ppo.rollout.max_rows, or set "
    "policy.activation_checkpointing and value.activation_checkpointing",
}
"""None of them changes what is computed."""


@contextmanager
def memory_advice(trainer: Trainer, phase: str, *, step: int) -> Generator[None]:
    """Raises TrainingError in the place of an allocation that failed on the device or in Python."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not _ran_out(error):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise TrainingError(
            f"step {step}: memory ran out in {phase}; {SETTINGS[trainer]}; neither changes the result ({reason})"
        ) from error


def _ran_out(error: Exception) -> bool:
    """On the CPU torch says so in the text of a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
