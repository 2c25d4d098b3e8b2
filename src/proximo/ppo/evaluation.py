"""Evaluates a policy: samples and scores responses to held-out prompts. When to evaluate: run/loop.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

from proximo.algorithms.kl import k1, k3
from proximo.config.ppo.options import PPOConfig
from proximo.metrics.values import Mean, MetricValue, Sum
from proximo.models.language import LanguageModel
from proximo.ppo.experience import task_reward_of
from proximo.ppo.roles.build import Roles
from proximo.ppo.roles.passes import logprobs_of
from proximo.ppo.roles.policy import sampling_options
from proximo.ppo.roles.reward import eager_begin
from proximo.ppo.selection import check_scored_fraction
from proximo.ppo.step_metrics import response_metrics, score_metrics
from proximo.records import Prompt, Scored
from proximo.rewards.source import NoReward, RewardSource, statistics_of
from proximo.rollout.engine import Engine
from proximo.rollout.ranks_engine import sampling_with
from proximo.rollout.sampling import RandomKey
from proximo.run.user_code import checked_scores


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Scored responses to the held-out prompts, grouped by prompt, with metrics."""

    scored: tuple[Scored, ...]
    kl: tuple[float | None, ...]
    """Sum of k1 over the tokens of each response, in nats; None in a run without a reference."""
    reference: tuple[Scored | None, ...]
    """For each response the reference's response, sampled with the same random numbers; None if it is not sampled."""
    metrics: dict[str, MetricValue]


def evaluate_policy(
    roles: Roles, prompts: Sequence[Prompt], *, reward: RewardSource, config: PPOConfig, seed: int
) -> Evaluation:
    """Sample with the options of the rollout, or greedily with `evaluate_greedy`, and score.

    `evaluate_average` evaluates the policy's moving average. The random numbers do not depend on the step, so that
    evaluations are comparable across steps. Raises TrainingError if more than `guards.max_unscored_fraction` of the
    responses are unscored, because the mean over the rest might select the wrong best checkpoint.
    """
    size = config.evaluation_samples_per_prompt
    roles.policy.push_weights()

    def answered(engine: Engine, model: LanguageModel, where: str) -> list[Scored]:
        with sampling_with(engine, model):
            responses = engine.generate(
                prompts,
                num_samples=size,
                options=sampling_options(config, greedy=config.evaluate_greedy),
                key=RandomKey(seed=seed, purpose="evaluation", step=0),
                on_finished=eager_begin(reward),
            )
        scored = checked_scores(reward, responses)
        check_scored_fraction(scored, config.guards, where=where)
        return scored

    scored = answered(roles.evaluated.engine, roles.evaluated.model, "evaluation")
    responses = [s.response for s in scored]
    divergences: list[float | None] = [None] * len(responses)
    if roles.reference is not None:
        # Always k1, whatever kl.estimator is: a full KL over the vocabulary would cost a pass and is not shown.
        both = [logprobs_of(worker.model, responses, config) for worker in (roles.evaluated, roles.reference)]
        parts = k1(*both).split([len(response.token_ids) for response in responses])
        divergences = [float(part.double().sum()) for part in parts]
    is_scored = not isinstance(reward, NoReward)
    metrics = _metrics(scored, divergences, is_scored=is_scored) | statistics_of(reward)
    if roles.reference is not None and not is_scored:
        metrics["evaluation/k3_per_token"] = Mean(float(k3(*both).double().sum()), len(both[0]))
    if config.solved_score is not None:
        metrics |= pass_metrics(scored, size=size, config=config)
    if config.task_reward is not None:
        metrics["evaluation/task_reward"] = Mean.of(task_reward_of(s, config.task_reward) for s in scored if s.valid)
    opponents: list[Scored | None] = [None] * len(scored)
    if roles.reference is not None and roles.reference.engine is not None:
        opponents = list(answered(roles.reference.engine, roles.reference.model, "evaluation, the reference's answers"))
        metrics |= _duel_metrics(scored, opponents)
    return Evaluation(scored=tuple(scored), kl=tuple(divergences), reference=tuple(opponents), metrics=metrics)


def _metrics(
    scored: Sequence[Scored], divergences: Sequence[float | None], *, is_scored: bool
) -> dict[str, MetricValue]:
    responses, scores = response_metrics(scored), score_metrics(scored) if is_scored else {}
    whole = {"score/mean": "evaluation/score", "score/std": "evaluation/score_std"}
    components = {
        f"evaluation/score/{name.split('/')[1]}": value for name, value in scores.items() if name.count("/") == 2
    }
    return (
        components
        | {whole[name]: value for name, value in scores.items() if name in whole}
        | {
            "evaluation/tokens": responses["response/tokens_mean"],
            "evaluation/finished_fraction": responses["response/finished_fraction"],
            "evaluation/distinct_2": responses["response/distinct_2"],
            "evaluation/unscored": responses["response/unscored"],
            "evaluation/responses": Sum(len(scored)),
            "evaluation/kl": Mean.of(value for value in divergences if value is not None),
        }
    )


def pass_metrics(scored: Sequence[Scored], *, size: int, config: PPOConfig) -> dict[str, MetricValue]:
    """pass@k over `size` responses to each prompt. A response solves its prompt from `solved_score` on.

    k = 1, 2, 4, ... and `size`. Prompts with fewer than k scored responses are left out."""
    assert config.solved_score is not None
    solved = [task_reward_of(s, config.task_reward) >= config.solved_score if s.valid else None for s in scored]
    groups = [
        [result for result in solved[start : start + size] if result is not None]
        for start in range(0, len(scored), size)
    ]
    counts = [(len(group), sum(group)) for group in groups]
    sizes = sorted({2**power for power in range(size.bit_length())} | {size})
    return {
        f"evaluation/pass_at_{k}": Mean.of(pass_at_k(total, solved, k) for total, solved in counts if total >= k)
        for k in sizes
    }


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the share of all sets of k samples in which one is right (arXiv:2107.03374, eq. 1).

    Unbiased for the chance that k fresh samples hold a right one, unlike 1 - (1 - c / n)^k, which is too low. Exact in
    integers until the division. Raises ValueError for fewer samples than k.
    """
    if not 0 <= num_solved <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@k wants 1 <= k <= samples and 0 <= solved <= samples, got {k=}, {num_samples=}, {num_solved=}"
        )
    return 1 - comb(num_samples - num_solved, k) / comb(num_samples, k)


def _duel_metrics(scored: Sequence[Scored], opponents: Sequence[Scored | None]) -> dict[str, MetricValue]:
    """Mean reference score and win rate over pairs in which both responses have a score. A tie is half a win."""
    pairs = [
        (a.score, b.score) for a, b in zip(scored, opponents, strict=True) if b is not None and a.valid and b.valid
    ]
    return {
        "evaluation/reference_score": Mean.of(other for _, other in pairs),
        "evaluation/win_rate": Mean.of((own > other) + (own == other) / 2 for own, other in pairs),
    }
