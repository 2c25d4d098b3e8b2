"""From rewards to advantages and returns, as the configuration chooses. Pure; the formulas are in algorithms/."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from proximo.algorithms import advantages as estimators
from proximo.algorithms.segments import segment_sum
from proximo.config.ppo.options import PPOConfig
from proximo.records import Finish, Scored


def estimate_advantages(
    scored: Sequence[Scored],
    rewards: Tensor,
    values: Tensor | None,
    mask: Tensor,
    counts: Tensor,
    *,
    config: PPOConfig,
) -> tuple[Tensor, Tensor | None]:
    """Advantages [T], not yet standardised, and the value model's targets [T]; None without a critic.

    `counts` [R]: whether a response has a part in baselines. `rewards` [T] are read on the mask alone.
    """
    lengths = [len(s.response.token_ids) for s in scored]
    if config.uses_critic:
        if values is None:
            raise ValueError("advantage gae needs values")
        return _gae(scored, rewards, values, mask, lengths, config=config)
    gamma = config.advantage.gamma
    if config.advantage.estimator in ("return_to_go", "greedy_baseline"):  # the baseline is in the score already
        return estimators.returns_to_go(rewards, mask, lengths, gamma=gamma), None
    groups = group_numbers(scored)
    if config.advantage.estimator == "group_return_to_go":
        return estimators.group_returns_to_go(rewards, groups, counts, mask, lengths, gamma=gamma), None
    # Each response's return (score and KL penalty) beside those of the same prompt, the same for all its tokens.
    compare: Callable[[Tensor, Tensor, Tensor], Tensor] = {
        "group_centred": estimators.group_centred,
        "group_standardised": estimators.group_standardised,
        "leave_one_out": estimators.leave_one_out,
        "length_weighted": partial(estimators.length_weighted, num_tokens=segment_sum(mask.long(), lengths)),
        "pass_at_k": partial(estimators.pass_at_k, k=config.advantage.k),
    }[config.advantage.estimator]
    return estimators.broadcast_to_tokens(compare(segment_sum(rewards, lengths), groups, counts), lengths), None


def _gae(
    scored: Sequence[Scored],
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    *,
    config: PPOConfig,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, each with its own decay where two are given (VAPO, arXiv:2504.05118)."""
    keeps_value = config.truncated == "bootstrap"
    bootstrap = torch.tensor([keeps_value and s.response.finish is Finish.LENGTH for s in scored])
    advantage = config.advantage

    def with_lam(lam: float | Tensor) -> tuple[Tensor, Tensor]:
        return estimators.gae(rewards, values, mask, lengths, bootstrap=bootstrap, gamma=advantage.gamma, lam=lam)

    lam: float | Tensor = advantage.lam
    if advantage.length_adaptive is not None:
        # The tokens that the estimator walks over: what a tool wrote is no part of the response's length.
        num_tokens = segment_sum(mask.to(rewards.dtype), lengths)
        lam = estimators.length_adaptive_lam(num_tokens, alpha=advantage.length_adaptive)
    advantages, returns = with_lam(lam)
    return advantages, returns if advantage.value_lam is None else with_lam(advantage.value_lam)[1]


def group_numbers(scored: Sequence[Scored]) -> Tensor:
    """[R] a number for each prompt, equal for its responses."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(s.response.prompt.id, len(numbers)) for s in scored])
