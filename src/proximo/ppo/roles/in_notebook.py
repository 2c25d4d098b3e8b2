"""The progress of PPO as a library, which a notebook alone shows."""

from rich.console import Console

from proximo.metrics.console import ProgressInfo, ProgressView
from proximo.metrics.console import open_progress as open_view
from proximo.trainer_kinds import TrainerKind, recipe_kind


def open_progress(*, first_step: int, total_steps: int, quiet: bool) -> ProgressView:
    """A live view in a notebook. Elsewhere `train` shows nothing."""
    console, kind = Console(stderr=True), recipe_kind("ppo")
    assert isinstance(kind, TrainerKind)
    info = ProgressInfo(trainer=kind, total_steps=total_steps, first_step=first_step)
    return open_view(info, console=console, quiet=quiet or not console.is_jupyter)
