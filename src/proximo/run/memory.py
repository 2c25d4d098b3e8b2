"""Out-of-memory errors that name the step, the phase and the settings to lower; releasing the cache; peak memory."""

import resource
import sys
from collections.abc import Generator
from contextlib import contextmanager

import torch

from proximo.errors import ConfigError, TrainingError, memory_ran_out


@contextmanager
def memory_advice(settings: str, phase: str, *, step: int) -> Generator[None]:
    """Turns a failed allocation, on the device or in Python, into a TrainingError, as well as the lack of a kernel that
    `run.deterministic` demands.

    settings: advice on what to change, from `TrainerRecipe.memory_settings`.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        if "does not have a deterministic implementation" in reason:
            raise TrainingError(
                f"step {step}: {reason.partition(', but')[0]}, in {phase}: set run.deterministic to false, and no two "
                "runs have the same bits"
            ) from error
        if not memory_ran_out(error):
            raise
        raise TrainingError(
            f"step {step}: memory ran out in {phase}; {settings}; neither changes the result. "
            f"`proximo plan` with this recipe shows the memory of each part ({reason})"
        ) from error


def check_release(wanted: bool, device: torch.device) -> None:
    """Raises ConfigError if the device has no cache to release."""
    if wanted and device.type == "cpu":
        raise ConfigError(
            "ppo.release_cache gives cached memory of an accelerator back, and this run is on the cpu, which keeps "
            "none: remove it"
        )


def release_cache(device: torch.device) -> None:
    """Empty torch's cache of freed blocks on an accelerator, so that the next phase does not fragment it."""
    {"cuda": torch.cuda, "mps": torch.mps}[device.type].empty_cache()


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory in MiB: of the accelerator's tensors on CUDA, else resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
