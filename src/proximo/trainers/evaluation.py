"""Held-out prompts, sampled and scored, without learning. Not the choice of when: that is the loop's."""

from collections.abc import Sequence
from dataclasses import dataclass

from proximo.algorithms.kl import k1
from proximo.config.ppo import PPOConfig
from proximo.metrics.values import Mean, MetricValue, Sum
from proximo.records import Prompt, Scored
from proximo.rewards.source import RewardSource
from proximo.rollout.sampling import RandomKey
from proximo.trainers.calls import InferenceCalls, Roles
from proximo.trainers.step_metrics import response_metrics, score_metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One response to each held-out prompt, with what was measured of it."""

    scored: tuple[Scored, ...]
    kl: tuple[float | None, ...]
    """Nats per response, the sum of k1 over its tokens; None in a run without a reference."""
    metrics: dict[str, MetricValue]


def evaluate_policy(
    roles: Roles, prompts: Sequence[Prompt], *, reward: RewardSource, config: PPOConfig, seed: int
) -> Evaluation:
    """Sample as the rollout does, or take the most likely tokens (`evaluate_greedy`), and score.

    The random numbers have a purpose of their own and no step, so that evaluations compare across steps.
    """
    # Shown as the sum of k1 whatever the run measures: a KL over the vocabulary would be computed for nothing.
    kl = config.kl.model_copy(update={"measure": "k1"})
    calls = InferenceCalls(roles, reward, config.model_copy(update={"responses_per_prompt": 1, "kl": kl}))
    key = RandomKey(seed=seed, purpose="evaluation", step=0)
    responses = calls.generate(prompts, key=key, policy_version=0, greedy=config.evaluate_greedy)
    (scored,) = calls.score(responses)
    divergences: list[float | None] = [None] * len(responses)
    if config.kl.place != "none":
        (policy,) = calls.policy_logprobs(responses)
        reference, _ = calls.reference_logprobs(responses)
        parts = k1(policy, reference).split([len(response.token_ids) for response in responses])
        divergences = [float(part.double().sum()) for part in parts]
    return Evaluation(scored=tuple(scored), kl=tuple(divergences), metrics=_metrics(scored, divergences))


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
        "evaluation/faulty": responses["response/faulty"],
        "evaluation/responses": Sum(len(scored)),
        "evaluation/kl": Mean.of(value for value in divergences if value is not None),
    }
