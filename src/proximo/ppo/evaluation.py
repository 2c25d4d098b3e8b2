"""Held-out prompts, sampled and scored, without learning. Not the choice of when: that is the loop's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from proximo.algorithms.kl import k1
from proximo.algorithms.pass_at_k import pass_at_k
from proximo.config.ppo.options import PPOConfig
from proximo.metrics.values import Mean, MetricValue, Sum
from proximo.ppo.counted import task_reward_of
from proximo.ppo.roles.inference import InferenceCalls, Roles
from proximo.ppo.scores import refuse_faulty
from proximo.ppo.step_metrics import response_metrics, score_metrics
from proximo.records import Prompt, Response, Scored
from proximo.rewards.source import RewardSource
from proximo.rewards.statistics import statistics_of
from proximo.rollout.sampling import RandomKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The responses to the held-out prompts, all of the first prompt first, with what was measured of them."""

    scored: tuple[Scored, ...]
    kl: tuple[float | None, ...]
    """Nats per response, the sum of k1 over its tokens; None in a run without a reference."""
    reference: tuple[Scored | None, ...]
    """Of each response the reference's, drawn with the same random numbers; None where it is not asked."""
    metrics: dict[str, MetricValue]


def evaluate_policy(
    roles: Roles, prompts: Sequence[Prompt], *, reward: RewardSource, config: PPOConfig, seed: int
) -> Evaluation:
    """Sample as the rollout does, or take the most likely tokens (`evaluate_greedy`), and score.

    The random numbers have a purpose of their own and no step, so that evaluations compare across steps. Raises
    TrainingError where more than `guards.max_unscored_fraction` could not be scored: a mean over what is left could
    choose the best checkpoint.
    """
    size = config.evaluation_samples_per_prompt
    # Shown as the sum of k1 whatever the run measures: a KL over the vocabulary would be computed for nothing.
    kl = config.kl.model_copy(update={"estimator": "k1"})
    own = {"responses_per_prompt": size, "samples_per_prompt": None, "kl": kl}
    calls = InferenceCalls(roles, reward, config.model_copy(update=own))
    responses = _answers(calls, prompts, seed=seed)
    (scored,) = calls.score(responses)
    refuse_faulty(scored, config.guards, where="evaluation")
    divergences: list[float | None] = [None] * len(responses)
    if config.kl.apply_to != "none":
        (policy,) = calls.policy_logprobs(responses)
        reference, _ = calls.reference_logprobs(responses)
        parts = k1(policy, reference).split([len(response.token_ids) for response in responses])
        divergences = [float(part.double().sum()) for part in parts]
    metrics = _metrics(scored, divergences) | statistics_of(reward)
    if config.solved_score is not None:
        metrics |= pass_metrics(scored, size=size, config=config)
    if config.task_reward is not None:
        metrics["evaluation/task_reward"] = Mean.of(
            task_reward_of(each, config.task_reward) for each in scored if each.valid
        )
    opponents: list[Scored | None] = [None] * len(scored)
    if roles.reference_engine is not None:
        theirs = InferenceCalls(replace(roles, engine=roles.reference_engine), reward, calls.config)
        (beside,) = theirs.score(_answers(theirs, prompts, seed=seed))
        refuse_faulty(beside, config.guards, where="evaluation, the reference's answers")
        opponents = list(beside)
        metrics |= _duel_metrics(scored, opponents)
    return Evaluation(scored=tuple(scored), kl=tuple(divergences), reference=tuple(opponents), metrics=metrics)


def _answers(calls: InferenceCalls, prompts: Sequence[Prompt], *, seed: int) -> list[Response]:
    key = RandomKey(seed=seed, purpose="evaluation", step=0)
    return calls.generate(prompts, key=key, policy_version=0, greedy=calls.config.evaluate_greedy)


def _metrics(scored: Sequence[Scored], divergences: Sequence[float | None]) -> dict[str, MetricValue]:
    responses, scores = response_metrics(scored), score_metrics(scored)
    components = {
        f"evaluation/score/{name.split('/')[1]}": value for name, value in scores.items() if name.count("/") == 2
    }
    return components | {
        "evaluation/score": scores["score/mean"],
        "evaluation/score_std": scores["score/std"],
        "evaluation/tokens": responses["response/tokens_mean"],
        "evaluation/finished_fraction": responses["response/finished_fraction"],
        "evaluation/distinct_2": responses["response/distinct_2"],
        "evaluation/unscored": responses["response/unscored"],
        "evaluation/responses": Sum(len(scored)),
        "evaluation/kl": Mean.of(value for value in divergences if value is not None),
    }


def pass_metrics(scored: Sequence[Scored], *, size: int, config: PPOConfig) -> dict[str, MetricValue]:
    """pass@k of `size` responses to each prompt, where `solved_score` says what solves it.

    For k = 1, 2, 4, ... and all samples; prompts with fewer than k responses that have a score are left out."""
    assert config.solved_score is not None
    solved = [task_reward_of(s, config.task_reward) >= config.solved_score if s.valid else None for s in scored]
    groups = [
        [each for each in solved[start : start + size] if each is not None] for start in range(0, len(scored), size)
    ]
    counts = [(len(group), sum(group)) for group in groups]
    sizes = sorted({2**power for power in range(size.bit_length())} | {size})
    return {
        f"evaluation/pass_at_{k}": Mean.of(pass_at_k(total, solved, k) for total, solved in counts if total >= k)
        for k in sizes
    }


def _duel_metrics(scored: Sequence[Scored], opponents: Sequence[Scored | None]) -> dict[str, MetricValue]:
    """Of the pairs in which both have a score; a draw is half a win."""
    pairs = [
        (a.score, b.score) for a, b in zip(scored, opponents, strict=True) if b is not None and a.valid and b.valid
    ]
    return {
        "evaluation/reference_score": Mean.of(other for _, other in pairs),
        "evaluation/win_rate": Mean.of((own > other) + (own == other) / 2 for own, other in pairs),
    }
