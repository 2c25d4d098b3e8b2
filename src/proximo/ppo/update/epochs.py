"""Runs the updates of a step: epochs of minibatches over one experience. The losses are passed in."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from proximo.config.ppo.options import PPOConfig
from proximo.learner.update import Learner, UpdateResult
from proximo.models.language import LanguageModel
from proximo.models.scalar import ScalarModel
from proximo.ppo.update.guards import PolicyGuard
from proximo.ppo.update.micro_batching import cut_minibatch, plan_updates
from proximo.ppo.update.microbatch import Microbatch
from proximo.ppo.update.ptx import JointUpdates
from proximo.ppo.update.reports import UpdateLog
from proximo.records import Experience

Statistics = TypeVar("Statistics")


class Epochs:
    """Runs the epochs of updates of one model over the experience of a step."""

    def __init__(
        self,
        model: LanguageModel | ScalarModel,
        config: PPOConfig,
        *,
        seed: int,
        prepare: Callable[[list[Microbatch]], list[Microbatch]] = lambda batches: batches,
    ) -> None:
        """`prepare`: applied to the micro-batches of a minibatch before its update."""
        self.model = model
        self.config = config
        self.seed = seed
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
    ) -> UpdateLog[Statistics]:
        """Run all planned updates, or stop when the guard ends the step.

        `columns`: name -> [T] inputs of the loss. `step` counts from 0.
        """
        # Values outside the mask may be anything, also NaN, and must not reach a loss.
        clean = {name: torch.where(experience.mask, column, 0.0) for name, column in columns.items()}
        plan = plan_updates(experience, self.config, seed=self.seed, step=step)
        taken: UpdateLog[Statistics] = UpdateLog(num_planned=len(plan))
        budget, device, pairs = (
            self.config.tokens_per_microbatch,
            self.model.device,
            self.config.policy_loss.is_pairwise,
        )
        refusal = guard.refusal if guard is not None else lambda _: None
        with learner.training():
            for members in plan:
                batches = cut_minibatch(experience, clean, members, token_budget=budget, device=device, in_pairs=pairs)
                result = learner.update(self.prepare(batches), loss, guard=refusal)
                taken.results.append(result)
                taken.num_tokens.append(batches[0].num_update_tokens)
                taken.num_responses.append(batches[0].num_update_responses)
                if guard is not None and result.refusal is not None and guard.ends(result.statistics):
                    taken.ended = True
                    break
        return taken


def too_many_skipped(results: Sequence[UpdateResult], config: PPOConfig, *, role: str, step: int) -> str | None:
    """Why the run ends after this step: more than `guards.max_skipped_fraction` of the updates were skipped. Else None.

    `step` counts from 0.
    """
    skipped = [result.refusal for result in results if result.refusal]
    limit = config.guards.max_skipped_fraction
    if len(skipped) <= limit * len(results):
        return None
    return (
        f"step {step + 1}: {len(skipped)} of {len(results)} updates of the {role} were skipped, more than "
        f"ppo.guards.max_skipped_fraction = {limit:g} allows; the last reason: {skipped[-1]}"
    )
