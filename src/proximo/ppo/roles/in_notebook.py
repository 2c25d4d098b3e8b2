"""What a notebook shows of PPO as a library: the progress of `train`, and a trainer as a card."""

from rich.console import Console

from proximo.counts import count_of
from proximo.metrics.console import NotebookProgress, ProgressInfo, ProgressView, QuietProgress
from proximo.metrics.formatting import format_number
from proximo.metrics.notebook.html import Card, card_html
from proximo.ppo.roles.build import Roles
from proximo.ppo.roles.worker import RoleWorker
from proximo.ppo.train_state import TrainState
from proximo.trainer_kinds import TrainerKind, recipe_kind


def open_progress(*, first_step: int, total_steps: int, quiet: bool) -> ProgressView:
    """A live view in a notebook. Elsewhere `train` shows nothing."""
    console, kind = Console(stderr=True), recipe_kind("ppo")
    if quiet or not console.is_jupyter:
        return QuietProgress(console)
    assert isinstance(kind, TrainerKind)
    return NotebookProgress(ProgressInfo(trainer=kind, total_steps=total_steps, first_step=first_step))


def trainer_html(state: TrainState, roles: Roles, *, num_steps: int) -> str:
    """Steps, updates, the KL coefficient and the models of a trainer."""
    facts = [
        ("Steps", f"{state.steps_done:,} of {num_steps:,}, {count_of(roles.policy.version, 'update')} of the policy"),
        ("KL coefficient", format_number(state.kl_coefficient)),
        *((worker.role, _described(worker)) for worker in roles.workers),
    ]
    return card_html(Card(title="PPOTrainer", facts=facts))


def _described(worker: RoleWorker) -> str:
    base = worker.model.base
    total = sum(each.numel() for each in base.parameters())
    trained = "trained" if worker.learner else "not trained"
    return f"{type(base).__name__}, {total:,} parameters, {trained}, {worker.precision} on {worker.device}"
