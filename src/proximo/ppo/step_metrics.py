"""Turns the records of a PPO step into declared metrics."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from proximo.algorithms.kl import k1, k3
from proximo.algorithms.losses import explained_variance
from proximo.algorithms.masking import segment_sum
from proximo.config.ppo.objectives import ObjectiveConfig
from proximo.config.ppo.options import PPOConfig
from proximo.errors import TrainingError
from proximo.metrics.values import Deviation, Last, Max, Mean, MetricValue, Sum
from proximo.ppo.calls import PHASES, Calls, TracedCall
from proximo.ppo.episodes import episode_metrics
from proximo.ppo.experience import (
    ShapedScores,
    StepExperience,
    counted_mask,
    counted_responses,
    group_ids,
    in_zero_variance_group,
    sequence_kl,
    task_reward_of,
    token_values,
)
from proximo.ppo.roles.policy import sampled_logprobs
from proximo.ppo.selection import Batch
from proximo.ppo.update.epochs import Report
from proximo.ppo.update.guards import broken_limits, first_minibatch
from proximo.records import Experience, Scored
from proximo.rollout.asynchronous import Rollouts

RECOMPUTED = frozenset({"policy_logprobs", "policy_logprobs_and_values"})
"""Calls that compute the old log-probs of a step, where the sampler's do not serve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepAhead:
    """The asynchronous rollouts of a step."""

    rollouts: Rollouts
    steps_behind: Tensor
    """[T] int64: how many steps ago the weights that drew each token were trained last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """The results of one step: its responses, their experience, the reports of the updates, and its calls."""

    made: StepExperience
    batch: Batch
    """The responses that it trained on, among all that it sampled."""
    policy: Report | None
    """None during critic warm-up."""
    value: Report | None
    calls: Calls
    """Its calls in order, their seconds, and what calls of yours measured."""
    kl_coefficient: float | None = None
    """The coefficient in this step; None in a run without KL."""
    is_scored: bool = True
    """False in a run without a reward, whose scores mean nothing."""
    ahead: StepAhead | None = None
    """None in a synchronous step."""

    @property
    def experience(self) -> Experience:
        """What the updates learned from."""
        return self.made.experience

    @property
    def sampled(self) -> Sequence[Scored]:
        """All sampled responses, including those that are not trained on."""
        return self.batch.sampled

    @property
    def seconds(self) -> Mapping[str, float]:
        """Name of a call -> its wall-clock seconds."""
        return self.calls.seconds

    @property
    def trace(self) -> tuple[TracedCall, ...]:
        """The calls that the step made, in order."""
        return tuple(self.calls.trace)

    @property
    def guard(self) -> str | None:
        """Why a guard ends the run after this step; None to go on."""
        return next((each.guard for each in (self.policy, self.value) if each is not None and each.guard), None)

    def check_guard(self) -> None:
        """Raises TrainingError where a guard ends the run."""
        if self.guard is not None:
            raise TrainingError(self.guard)


def step_metrics(outcome: StepOutcome, config: PPOConfig, *, precision: str) -> dict[str, MetricValue]:
    """All metrics of a step."""
    metrics = (
        experience_metrics(outcome, config)
        | update_metrics(outcome, precision=precision, objective=config.policy_loss.objective)
        | time_metrics(outcome, num_epochs=config.epochs_per_step)
    )
    if outcome.is_scored:
        metrics |= group_metrics(outcome.experience.scored, counted_mask(outcome.experience.scored, config), config)
    if RECOMPUTED & outcome.seconds.keys():
        metrics |= mismatch_metrics(outcome.experience, None if outcome.ahead is None else outcome.ahead.steps_behind)
    if outcome.ahead is not None:
        metrics |= staleness_metrics(outcome.experience, outcome.ahead)
    coefficient = outcome.kl_coefficient
    return metrics if coefficient is None else metrics | {"kl/coefficient": Last(coefficient)}


def experience_metrics(outcome: StepOutcome, config: PPOConfig) -> dict[str, MetricValue]:
    """Metrics of a step's experience. Unscored responses count only in `response/unscored`."""
    (experience, raw, shaped), batch = outcome.made, outcome.batch
    mask, lengths = experience.mask, experience.lengths
    totals = segment_sum(torch.where(mask, experience.rewards, 0.0), lengths).tolist()
    valid = [i for i, scored in enumerate(experience.scored) if scored.valid]
    counted = counted_responses(experience)
    metrics: dict[str, MetricValue] = response_metrics(experience.scored)
    if any(s.response.episode is not None for s in experience.scored):
        metrics |= episode_metrics(experience.scored)
    metrics |= (score_metrics(experience.scored) if outcome.is_scored else {}) | {
        "reward/mean": Mean.of(totals[i] for i in counted),
        "advantage/mean": Mean(raw.mean * raw.num_tokens, raw.num_tokens),
        "advantage/std": Deviation(raw.num_tokens, raw.mean, raw.variance * raw.num_tokens),
        "reward/std": Last(raw.spread.deviation),
        "policy/entropy": Mean(-_sum(experience.old_logprobs, mask), raw.num_tokens),
    }
    metrics |= {f"extra/{name}": Last(number) for name, number in outcome.calls.measured.items()}
    if config.samples_per_prompt is not None or batch.resamples:
        metrics |= _candidate_metrics(batch.sampled)
    if batch.resamples:
        metrics["group/rollouts"] = Last(batch.num_rollouts)
    if config.shapes_scores:
        metrics |= _shaped_score_metrics(shaped, experience.scored)
    if experience.reference_logprobs is not None:
        metrics |= _kl_metrics(experience, counted)
    if experience.returns is not None:
        metrics["advantage/flat"] = Last(float(raw.spread.is_flat))
        explained = explained_variance(token_values(experience), experience.returns, mask)
        metrics["value/explained_variance"] = Last(float(explained))
    elif config.advantage.needs_groups:
        metrics["group/zero_advantage_fraction"] = _zero_groups(experience, valid)
    return metrics


def update_metrics(outcome: StepOutcome, *, precision: str, objective: ObjectiveConfig) -> dict[str, MetricValue]:
    """Metrics of the policy and value updates, and of the first-minibatch check."""
    metrics = {} if outcome.policy is None else dict(outcome.policy.metrics)
    if outcome.value is not None:
        metrics |= outcome.value.metrics
    first = None if outcome.policy is None else outcome.policy.first_minibatch
    if first is not None:
        exceeded = bool(broken_limits(first, precision=precision, objective=objective))
        measured = first_minibatch(first) | {"limit_exceeded": Sum(int(exceeded))}
        metrics |= {f"first_minibatch/{name}": metric for name, metric in measured.items()}
    return metrics


def time_metrics(outcome: StepOutcome, *, num_epochs: int) -> dict[str, MetricValue]:
    """Seconds of each call, and throughput. In training a token counts once per epoch and backbone."""
    names = {"reference_logprobs": "reference"}
    metrics: dict[str, MetricValue] = {
        f"time/{names.get(call, call)}_seconds": Sum(seconds)
        for call, seconds in outcome.seconds.items()
        if call in PHASES or call in ("experience", "move_average", "follow_policy")  # others take no time
    }
    own_seconds = outcome.calls.own_seconds
    if own_seconds:
        metrics["time/extra_seconds"] = Sum(own_seconds)
    responses = [scored.response for scored in outcome.experience.scored]
    sampled = sum(int(scored.response.response_mask.sum()) for scored in outcome.sampled)
    read = sum(len(context) + len(tokens) for response in responses for context, tokens in response.sequences)
    if "generate" in outcome.seconds:
        metrics["time/rollout_seconds"] = Sum(outcome.seconds["generate"])
        del metrics["time/generate_seconds"]
        seconds = outcome.seconds["generate"] if outcome.ahead is None else outcome.ahead.rollouts.seconds
        metrics["throughput/rollout_tokens_per_second"] = Mean(sampled, seconds)
    training = sum(seconds for call, seconds in outcome.seconds.items() if call.startswith("train_"))
    policy_passes = 0.0 if outcome.policy is None else outcome.policy.share_trained
    own_passes = outcome.value is not None and "train_policy_and_value" not in outcome.seconds
    passes = num_epochs * (policy_passes + own_passes)
    metrics["throughput/train_tokens_per_second"] = Mean(passes * read, training)
    metrics["time/step_seconds"] = Sum(sum(outcome.seconds.values()) + own_seconds)
    return metrics


def response_metrics(scored: Sequence[Scored]) -> dict[str, MetricValue]:
    """Metrics of length, termination and diversity of the responses."""
    kept = [s.response for s in scored if s.valid]
    lengths = [len(response.token_ids) for response in kept]
    return {
        "response/tokens_mean": Mean.of(lengths),
        "response/tokens_max": Max.of(lengths),
        "response/finished_fraction": Mean.of(float(response.finish.terminated) for response in kept),
        "response/repeat_4gram": Mean.of(repeated_fraction(response.token_ids) for response in kept),
        "response/distinct_2": Last(distinct_fraction(response.token_ids for response in kept)),
        "response/unscored": Sum(len(scored) - len(kept)),
    }


def distinct_fraction(responses: Iterable[Sequence[int]], *, n: int = 2) -> float | None:
    """Distinct-n: distinct n-grams divided by all n-grams, over all responses together (arXiv:1510.03055).

    None if no response has `n` tokens. The value falls as the number of tokens grows, so compare only sets of about the
    same size.
    """
    seen: set[tuple[int, ...]] = set()
    total = 0
    for token_ids in responses:
        for start in range(len(token_ids) - n + 1):
            seen.add(tuple(token_ids[start : start + n]))
            total += 1
    return len(seen) / total if total else None


def repeated_fraction(token_ids: Sequence[int], *, n: int = 4) -> float:
    """Share of a response's n-grams that repeat an earlier one: 1 - distinct / all. 0 below n + 1 tokens.

    0 if no n-gram occurs twice, near 1 for a response that loops.
    """
    ngrams = [tuple(token_ids[start : start + n]) for start in range(len(token_ids) - n + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def score_metrics(scored: Sequence[Scored]) -> dict[str, MetricValue]:
    """Metrics of the score and its components."""
    kept = [s for s in scored if s.valid]
    names = sorted({name for s in kept for name in s.components})
    metrics: dict[str, MetricValue] = {
        f"score/{name}/mean": Mean.of(s.components[name] for s in kept if name in s.components) for name in names
    }
    scores, lengths = [s.score for s in kept], [len(s.response.token_ids) for s in kept]
    with suppress(statistics.StatisticsError):  # undefined for constant lengths or scores, or fewer than two responses
        metrics["score/length_correlation"] = Last(statistics.correlation(lengths, scores))
    best = max(scores, default=0.0)
    own = {"score/mean": Mean.of(scores), "score/std": Deviation.of(scores)}
    return own | {"score/best_fraction": Mean.of(float(score == best) for score in scores)} | metrics


def _candidate_metrics(candidates: Sequence[Scored]) -> dict[str, MetricValue]:
    scores = [s.score for s in candidates if s.valid]
    return {
        "score/sampled_mean": Mean.of(scores),
        "score/sampled_std": Deviation.of(scores),
        "response/sampled": Sum(len(candidates)),
        "response/sampled_unscored": Sum(len(candidates) - len(scores)),
    }


def _shaped_score_metrics(shaped: ShapedScores, scored: Sequence[Scored]) -> dict[str, MetricValue]:
    values = shaped.values[shaped.counted].tolist()
    metrics: dict[str, MetricValue] = {
        "score/shaped_mean": Mean.of(values),
        "score/shaped_std": Deviation.of(values),
    }
    if shaped.penalised is not None:
        metrics["score/penalised_fraction"] = Mean.of(shaped.penalised[shaped.counted].float().tolist())
    answers = {s.response.prompt.id: s.answer_score for s in scored if s.valid and s.answer_score is not None}
    if answers:
        metrics["score/answer_mean"] = Mean.of(answers.values())
    if shaped.moments.count:
        metrics["score/running_mean"] = Last(shaped.moments.mean)
        metrics["score/running_std"] = Last(shaped.moments.deviation or 0.0)
    return metrics


def _zero_groups(experience: Experience, valid: Sequence[int]) -> Mean:
    """Fraction of prompts whose tokens all have the same advantage. It may differ from 0 after standardising."""
    sizes = list(experience.lengths)
    parts = list(zip(experience.advantages.split(sizes), experience.mask.split(sizes), strict=True))
    by_prompt: dict[str, set[float]] = {}
    for index in valid:
        advantages, mask = parts[index]
        by_prompt.setdefault(experience.scored[index].response.prompt.id, set()).update(advantages[mask].tolist())
    return Mean.of(float(len(advantages) <= 1) for advantages in by_prompt.values())


def _kl_metrics(experience: Experience, counted: Sequence[int]) -> dict[str, MetricValue]:
    assert experience.reference_logprobs is not None
    mask, count = experience.mask, int(experience.mask.sum())
    policy, reference = experience.old_logprobs, experience.reference_logprobs
    per_response = sequence_kl(experience)
    return {
        "kl/sequence": Mean.of(value for i in counted if (value := per_response[i]) is not None),
        "kl/per_token": Mean(_sum(k1(policy, reference), mask), count),
        "kl/k3_per_token": Mean(_sum(k3(policy, reference), mask), count),
    }


def mismatch_metrics(experience: Experience, steps_behind: Tensor | None = None) -> dict[str, MetricValue]:
    """Metrics of the sampler's log-probs against the learner's own, which are the old ones.

    `steps_behind`: where it is above 0, earlier weights drew the token, and it is left out.
    """
    sampled = sampled_logprobs([scored.response for scored in experience.scored])
    given = experience.mask & sampled.isfinite()
    missing = Sum(int((experience.mask & ~given).sum()))
    if steps_behind is not None:
        given &= steps_behind == 0
    count = int(given.sum())
    log_ratios = (sampled - experience.old_logprobs)[given].abs()
    return {
        "mismatch/kl": Mean(_sum(k1(sampled, experience.old_logprobs), given), count),
        "mismatch/k3": Mean(_sum(k3(sampled, experience.old_logprobs), given), count),
        "mismatch/max_abs_log_ratio": Max.of([float(log_ratios.max())] if count else []),
        "mismatch/missing_logprobs": missing,
    }


def staleness_metrics(experience: Experience, ahead: StepAhead) -> dict[str, MetricValue]:
    """How old the weights were that sampled, how far they are from the learner's, and who waited for whom."""
    mask, behind, taken = experience.mask, ahead.steps_behind, ahead.rollouts
    sampled = sampled_logprobs([scored.response for scored in experience.scored])
    stale = mask & (behind > 0) & sampled.isfinite()
    given = mask & sampled.isfinite()
    weights = torch.where(given, (experience.old_logprobs - sampled).double().exp(), 0.0)
    share = float(weights.sum().square() / weights.square().sum() / given.sum()) if given.any() else math.nan
    return {
        "staleness/mean_steps": Mean(int(behind[mask].sum()), int(mask.sum())),
        "staleness/max_steps": Max.of(behind[mask].tolist()),
        "staleness/k3": Mean(_sum(k3(sampled, experience.old_logprobs), stale), int(stale.sum())),
        "staleness/effective_fraction": Last(share),
        "staleness/interrupted_fraction": Mean.of(float(r.token_versions is not None) for r in taken.responses),
        "staleness/learner_idle_fraction": Mean(taken.waited_seconds, taken.seconds),
        "staleness/engine_idle_fraction": Mean(taken.idle_seconds, taken.seconds),
    }


def _sum(x: Tensor, mask: Tensor) -> float:
    return float(torch.where(mask, x, 0.0).double().sum())


def group_metrics(scored: Sequence[Scored], counted: Tensor, config: PPOConfig) -> dict[str, MetricValue]:
    """Mean task reward; for group estimators also shares of zero-variance groups and of responses in other groups."""
    metrics = {}
    if config.task_reward is not None:
        metrics["score/task_reward_mean"] = Mean.of(task_reward_of(s, config.task_reward) for s in scored if s.valid)
    if not config.advantage.needs_groups:
        return metrics
    equal, groups = in_zero_variance_group(scored, counted, config), group_ids(scored)
    by_group = {int(group): bool(same) for group, same in zip(groups[counted], equal[counted], strict=True)}
    return metrics | {
        "group/zero_variance_fraction": Mean.of(float(same) for same in by_group.values()),
        "group/effective_fraction": Mean.of((~equal[counted]).double().tolist()),
    }
