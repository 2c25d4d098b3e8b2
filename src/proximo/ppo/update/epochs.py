"""The updates of one step: epochs of minibatches over one experience. Not the losses, nor the optimizer step itself."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from proximo.config.ppo.options import PPOConfig
from proximo.errors import TrainingError
from proximo.learner.update import Learner, UpdateResult
from proximo.models.cpu.thread_split import check_peer, use_all_threads
from proximo.models.language import LanguageModel
from proximo.models.scalar import ScalarModel
from proximo.ppo.update.guards import PolicyGuard
from proximo.ppo.update.micro_batching import cut_minibatch, plan_updates
from proximo.ppo.update.microbatch import Microbatch
from proximo.ppo.update.overlap import updates_beside
from proximo.ppo.update.ptx import JointUpdates
from proximo.ppo.update.reports import Taken
from proximo.records import Experience

Statistics = TypeVar("Statistics")


class Epochs:
    """Takes a model through the experience of a step, epoch after epoch in minibatches."""

    def __init__(
        self,
        model: LanguageModel | ScalarModel,
        config: PPOConfig,
        *,
        seed: int,
        neighbour: LanguageModel | ScalarModel | None,
        prepare: Callable[[list[Microbatch]], list[Microbatch]] = lambda batches: batches,
    ) -> None:
        """`neighbour` is the model that may train at the same time. `prepare` sees the micro-batches of a minibatch
        before they are learned from.
        """
        self.model = model
        self.config = config
        self.seed = seed
        self.neighbour = neighbour
        self.prepare = prepare

    def take(
        self,
        learner: Learner | JointUpdates,
        experience: Experience,
        columns: dict[str, Tensor],
        loss: Callable[[Microbatch], tuple[Tensor, Statistics]],
        *,
        step: int,
        guard: PolicyGuard[Statistics] | None = None,
    ) -> Taken[Statistics]:
        """One update after the other; a refused one at which the guard ends the step is the last.

        `columns` are [T] each, what the loss reads of the tokens; `step` counts from 0.
        """
        # Tokens outside the mask may hold anything, NaN included: nothing of them enters a loss.
        clean = {name: torch.where(experience.mask, column, 0.0) for name, column in columns.items()}
        plan = plan_updates(experience, self.config, seed=self.seed, step=step)
        taken: Taken[Statistics] = Taken(num_planned=len(plan))
        beside = updates_beside(len(plan), self.model, self.neighbour, experience)
        budget, device = self.config.tokens_per_microbatch, self.model.device
        refusal = guard.refusal if guard is not None else lambda _: None
        with learner.training():
            for number, members in enumerate(plan):
                check_peer()
                if number == beside:
                    use_all_threads()
                batches = cut_minibatch(experience, clean, members, token_budget=budget, device=device)
                result = learner.update(self.prepare(batches), loss, guard=refusal)
                taken.results.append(result)
                taken.num_tokens.append(batches[0].num_update_tokens)
                taken.num_responses.append(batches[0].num_update_responses)
                if guard is not None and result.refusal is not None and guard.ends(result.statistics):
                    taken.ended = True
                    break
        return taken


def refuse_many_skipped(results: Sequence[UpdateResult], config: PPOConfig, *, role: str, step: int) -> None:
    """Raises TrainingError where more updates than `guards.max_skipped_fraction` were skipped; `step` from 0."""
    skipped = [result.refusal for result in results if result.refusal]
    limit = config.guards.max_skipped_fraction
    if len(skipped) > limit * len(results):
        raise TrainingError(
            f"step {step + 1}: {len(skipped)} of {len(results)} updates of the {role} were skipped, more than "
            f"max_skipped_fraction = {limit:g} allows; the last reason: {skipped[-1]}"
        )
