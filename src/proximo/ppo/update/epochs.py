"""Runs the updates of a step, epochs of minibatches that are cut into micro-batches, and reports on them.

The losses are passed in.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from proximo.algorithms.losses import PolicyStatistics
from proximo.config.ppo.options import PPOConfig
from proximo.errors import TrainingError
from proximo.learner.update import Learner, UpdateResult
from proximo.metrics.values import Last, Mean, MetricValue, Sum
from proximo.models.language import LanguageModel
from proximo.models.packing import (
    Packed,
    PackedResponses,
    pack_nothing,
    pack_trajectories,
    packed_length,
    plan_own_share,
    send,
    shareable_prefixes,
)
from proximo.models.scalar import ScalarModel
from proximo.ppo.update.guards import PolicyGuard
from proximo.ppo.update.ptx import JointUpdates
from proximo.records import Experience, Response, SamplingMask

Statistics = TypeVar("Statistics")


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Whole responses of a minibatch with all inputs of a loss. T is the number of their response tokens."""

    packed: PackedResponses
    mask: Tensor
    """[T] bool: tokens that count in the loss."""
    columns: dict[str, Tensor]
    """Name -> [T] inputs of the loss, in the order of the packed targets."""
    num_update_tokens: int
    """Number of masked-in tokens in the whole minibatch: the denominator of a mean over tokens."""
    num_update_responses: int
    """Number of responses in the whole minibatch: the denominator of a mean over responses."""

    @property
    def tokens(self) -> Packed:
        """All tokens of the micro-batch."""
        return self.packed.packed


@dataclass(kw_only=True, slots=True)
class UpdateLog(Generic[Statistics]):
    """Results of the attempted updates of one step, with the sizes of their minibatches."""

    num_planned: int
    results: list[UpdateResult[Statistics]] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_responses: list[int] = field(default_factory=list)
    ended: bool = False
    """True if the last result is an update that was not taken because the step ended there."""

    @property
    def whole(self) -> list[UpdateResult[Statistics]]:
        """The results without the update that ended the step."""
        return self.results[:-1] if self.ended else self.results

    @property
    def refusals(self) -> tuple[str, ...]:
        """Reasons of all updates that were not taken."""
        return tuple(result.refusal for result in self.results if result.refusal)


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
            self.config.policy_loss.objective.is_pairwise,
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


def plan_updates(experience: Experience, config: PPOConfig, *, seed: int, step: int) -> list[list[int]]:
    """Indices of the responses of each minibatch, over all epochs. `step` counts from 0.

    Raises TrainingError if no response has a token in the mask.
    """
    parts = experience.mask.split(list(experience.lengths))
    members = [index for index, part in enumerate(parts) if part.any()]
    if not members:
        raise TrainingError(
            f"step {step + 1}: no response has a token that counts; all {len(parts)} were empty, cut off under "
            "truncation: mask, or could not be scored"
        )
    groups: list[int] | list[str] | None = None
    if config.policy_loss.objective.is_pairwise:  # not by the prompt, of which a step may have several pairs
        groups = [index // 2 for index in members]
    elif config.groups_together:
        groups = [experience.scored[index].response.prompt.id for index in members]
    epochs = plan_minibatches(
        members,
        size=config.responses_per_update,
        num_epochs=config.epochs_per_step,
        seed=seed,
        step=step,
        groups=groups,
    )
    return [minibatch for epoch in epochs for minibatch in epoch]


def plan_minibatches(
    members: Sequence[int],
    *,
    size: int,
    num_epochs: int,
    seed: int,
    step: int,
    groups: Sequence[Hashable] | None = None,
) -> list[list[list[int]]]:
    """epoch -> minibatch -> members, each member once per epoch; the last minibatch of an epoch may be smaller.

    `groups`: the group of each member. Then groups are permuted, and the members of a group stay together. None
    permutes members.
    The result depends only on the arguments, so a resumed run that repeats a step sees the same minibatches.
    """
    together: dict[Hashable, list[int]] = {}
    for place, member in enumerate(members):
        together.setdefault(place if groups is None else groups[place], []).append(member)
    units = list(together.values())
    plan = []
    for epoch in range(num_epochs):
        order = np.random.Generator(np.random.Philox(key=[seed, (step << 16) + epoch])).permutation(len(units))
        shuffled = [member for i in order for member in units[i]]
        plan.append([shuffled[start : start + size] for start in range(0, len(shuffled), size)])
    return plan


def num_minibatches(num_members: int, size: int) -> int:
    """Minibatches of one epoch."""
    return -(-num_members // size)


def cut_minibatch(
    experience: Experience,
    columns: dict[str, Tensor],
    minibatch: Sequence[int],
    *,
    token_budget: int,
    device: torch.device,
    in_pairs: bool = False,
) -> list[Microbatch]:
    """Split a minibatch into micro-batches of whole responses within the token budget. `columns`: name -> [T].

    On several ranks these are this rank's micro-batches. One without responses is a pass over nothing. `in_pairs`: each
    two responses that follow one another stay together, also where they exceed the budget.
    """
    responses = [scored.response for scored in experience.scored]
    sizes, ends = experience.lengths, list(accumulate(experience.lengths))
    units = [minibatch[i : i + 2] for i in range(0, len(minibatch), 2)] if in_pairs else [[i] for i in minibatch]
    prefixes = shareable_prefixes([responses[unit[0]].prompt.token_ids for unit in units])
    plan = plan_own_share(
        # The responses of a pair share their prompt, except for its last token.
        [
            sum(packed_length(responses[i].sequences) for i in unit) - len(prefix) * (len(unit) - 1)
            for prefix, unit in zip(prefixes, units, strict=True)
        ],
        token_budget=token_budget,
        prefixes=prefixes,
    )
    chosen = [[i for index in indices for i in units[index]] for indices in plan]
    # Indexing is several times as fast as splitting every column into all its responses.
    source = experience.mask.device

    def indices_of(members: Sequence[int]) -> Tensor:
        nothing = torch.arange(0, device=source)
        return torch.cat([nothing, *(torch.arange(ends[i] - sizes[i], ends[i], device=source) for i in members)])

    token_indices = [indices_of(members) for members in chosen]
    masks = [experience.mask[indices] for indices in token_indices]
    num_update_tokens = int(experience.mask[indices_of(minibatch)].sum())
    return [
        Microbatch(
            packed=pack_members(responses, members, device=device),
            mask=send(mask, device),
            columns={name: send(column[indices], device) for name, column in columns.items()},
            num_update_tokens=num_update_tokens,
            num_update_responses=len(minibatch),
        )
        for members, indices, mask in zip(chosen, token_indices, masks, strict=True)
    ]


def pack_members(responses: Sequence[Response], indices: Sequence[int], *, device: torch.device) -> PackedResponses:
    """Pack the selected responses with their prompts; none of them as a sequence of one token without a response."""
    if not indices:
        return pack_nothing(device)
    chosen = [responses[i] for i in indices]
    mask = SamplingMask.of([(response.sampling_mask, len(response.token_ids)) for response in chosen])
    return pack_trajectories([response.sequences for response in chosen], sampling_mask=mask, device=device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Metrics and skip reasons of one model's updates in a step."""

    metrics: dict[str, MetricValue]
    refusals: tuple[str, ...]
    """Reasons of skipped updates. The last entry may be why the step ended early."""
    guard: str | None = None
    """Why a guard ends the run after this step."""
    first_minibatch: PolicyStatistics | None = None
    share_trained: float = 1.0
    """Fraction of the planned updates whose gradient was computed; below 1 if target_kl ended the step."""


class TrunkReports(NamedTuple):
    """Reports of policy and value head that were trained together."""

    policy: Report
    value: Report


AT_REST: dict[str, MetricValue] = {
    "policy/loss": Mean(0.0, 1),
    "policy/clip_fraction": Mean(0.0, 1),
    "policy/ratio_mean": Mean(1.0, 1),
    "policy/approx_kl": Mean(0.0, 1),
    "policy/skipped_updates": Sum(0),
}
"""Metrics of a step without policy updates."""


def policy_metrics(total: PolicyStatistics) -> dict[str, MetricValue]:
    """Clip fraction, mean ratio, effective sample size and KL of the policy updates."""
    count = total.num_tokens.item()
    return _other_metrics(total) | {
        "policy/clip_fraction": Mean(total.clipped.item(), count),
        "policy/ratio_mean": Mean(total.ratio.item(), count),
        "policy/effective_sample_size": Mean(total.ratio.item() ** 2, count * total.ratio_squared.item()),
        "policy/approx_kl": Mean(total.k3.item(), count),
    }


def _other_metrics(total: PolicyStatistics) -> dict[str, MetricValue]:
    """Metrics of what only some losses measure: the full KL, and pairs."""
    others = {name: value.item() for name, value in total.others.items()}
    if (num_pairs := others.pop("pairs", None)) is not None:
        means: dict[str, MetricValue] = {f"pairs/{name}": Mean(value, num_pairs) for name, value in others.items()}
        return means | {"pairs/trained": Sum(num_pairs)}
    names = {"full_kl": "kl/full_per_token", "same_top": "kl/same_top_fraction"}
    return {names[name]: Mean(value, total.num_tokens.item()) for name, value in others.items()}


def update_metrics(role: str, taken: UpdateLog, weights: Sequence[int]) -> dict[str, MetricValue]:
    """Losses, gradient norm, learning rate and skips of a role's updates. `weights`: the denominator of each loss."""
    applied = [(r, weight) for r, weight in zip(taken.results, weights, strict=True) if r.refusal is None]
    balancing = [r.balancing_loss for r, _ in applied if r.balancing_loss is not None]
    of_experts: dict[str, MetricValue] = {f"{role}/balancing_loss": Mean.of(balancing)} if balancing else {}
    return of_experts | {
        f"{role}/loss": Mean(sum(r.loss * weight for r, weight in applied), sum(weight for _, weight in applied)),
        f"{role}/gradient_norm": Mean.of(r.gradient_norm for r, _ in applied),
        f"{role}/learning_rate": Last((taken.whole or taken.results)[-1].learning_rate),
        f"{role}/skipped_updates": Sum(len(taken.whole) - len(applied)),
    }
