"""From the scores of responses to the advantages of their tokens: rewards, GAE with a value model, returns to go.

Shapes: T tokens of R responses, flat; `lengths` gives the tokens of each response. Baselines of groups:
group_baselines.py. Nothing here standardises over the batch (`masking.standardise` does), and nothing carries a
gradient: advantages and returns are constants to the losses.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from proximo.algorithms.discounted_scan import advantages_by_scan, returns_by_scan
from proximo.algorithms.masking import (
    broadcast_to_tokens,
    final_value_positions,
    segment_ids,
    segment_rows,
    segment_sum,
    token_positions,
    value_positions,
)

LEAST_SPREAD = 1e-6
"""A standard deviation below this fraction of the mean is rounding of float32 scores, not a spread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningMoments:
    """Count, mean and spread of all scores so far, in float64 as plain numbers, so that JSON keeps every bit."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""

    @property
    def deviation(self) -> float | None:
        """The unbiased standard deviation, dividing by count - 1; None if the scores have no spread.

        Fewer than two scores, or equal scores, have none. Dividing by their rounding error would give huge numbers.
        """
        if self.count < 2:
            return None
        deviation = math.sqrt(self.squares / (self.count - 1))
        return deviation if deviation > LEAST_SPREAD * abs(self.mean) else None


NOTHING_SEEN = RunningMoments()
"""The moments before the first step."""


def update_moments(moments: RunningMoments, scores: Float[Tensor, "responses"]) -> RunningMoments:
    """The moments with `scores` [R] added (Chan, Golub and LeVeque 1979).

    Computed in float64. Scores that are not finite are left out: one of them would spoil all later moments.
    """
    new = scores.double()
    new = new[new.isfinite()]
    if len(new) == 0:
        return moments
    new_mean = new.mean().item()
    new_squares = (new - new_mean).square().sum().item()
    count = moments.count + len(new)
    shift = new_mean - moments.mean
    return RunningMoments(
        count=count,
        mean=moments.mean + shift * len(new) / count,
        squares=moments.squares + new_squares + shift * shift * moments.count * len(new) / count,
    )


def overlong_penalty(
    lengths: Int[Tensor, "responses"], *, max_tokens: int, buffer_tokens: int, penalty: float
) -> Float[Tensor, "responses"]:
    """[R] float64: penalty * clip((length - (max_tokens - buffer_tokens)) / buffer_tokens, 0, 1).

    0 up to max_tokens - buffer_tokens, then a line that reaches `penalty` at max_tokens. `lengths` [R] counts tokens.
    Source: arXiv:2503.14476, eq. 13.
    """
    over = (lengths.double() - (max_tokens - buffer_tokens)) / buffer_tokens
    return penalty * over.clamp(0, 1)


def clip_scores(scores: Float[Tensor, "*shape"], limit: float | None) -> Float[Tensor, "*shape"]:
    """Scores cut to [-limit, limit], unchanged for None; shape kept. NaN stays NaN."""
    return scores if limit is None else scores.clamp(-limit, limit)


def clip_with_parts(
    values: Float[Tensor, "responses"],
    token_rewards: Float[Tensor, "tokens"],
    prefix_scores: Float[Tensor, "states"],
    lengths: Sequence[int],
    *,
    limit: float | None,
) -> tuple[Float[Tensor, "responses"], Float[Tensor, "tokens"]]:
    """[R] clipped scores, and [T] the parts of the tokens.

    The number of each token is clipped separately, and so is the remainder of the score: a limit for single tokens
    does not bound their sum.

    Args:
        values: [R] one per response, its tokens' part included.
        token_rewards: [T]; zeros where a source gave none.
        prefix_scores: [T + R], as in `prefix_deltas`; zeros where a source gave none.
        lengths: [R] tokens of each response.
        limit: each number is cut to [-limit, limit]; None cuts none.
    """
    rest = values - segment_sum(token_rewards, lengths) - prefix_scores[final_value_positions(lengths)]
    earned = clip_scores(token_rewards, limit) + prefix_deltas(clip_scores(prefix_scores, limit), lengths)
    return clip_scores(rest, limit) + segment_sum(earned, lengths), earned


def prefix_deltas(prefix_scores: Float[Tensor, "states"], lengths: Sequence[int]) -> Float[Tensor, "tokens"]:
    """r_t = s_t - s_(t-1), the change of each token to the score of the prompt with the response so far.

    Args:
        prefix_scores: [T + R] s_0, the score of the prompt alone, and s_t after each token, response by response.
        lengths: [R] tokens of each response.

    Returns:
        [T], summing over a response to s_n - s_0. This is shaping by a potential (Ng, Harada and Russell 1999): with
        gamma = 1 the expected policy gradient is that of s_n alone, since s_0 does not depend on the response.
    """
    before = value_positions(lengths, device=prefix_scores.device)
    return prefix_scores[before + 1] - prefix_scores[before]


def shape_rewards(
    kl_per_token: Float[Tensor, "tokens"],
    scores: Float[Tensor, "responses"],
    mask: Bool[Tensor, "tokens"],
    lengths: Sequence[int],
    *,
    kl_coefficient: float,
    token_rewards: Float[Tensor, "tokens"] | None = None,
) -> Float[Tensor, "tokens"]:
    """r_t = -kl_coefficient * kl_t, plus the score, once, at the last token that the policy wrote (arXiv:1909.08593).

    With `token_rewards` each token gets its own part of the score, and the last token the remainder. Without KL the
    rewards of a response sum to its score in both cases.

    Args:
        kl_per_token: [T] nats, any of `proximo.algorithms.kl`; zeros in a run without KL.
        scores: [R] one per response; unread where a response has no token in the mask.
        mask: [T] bool, True where the policy wrote the token; rewards are 0 elsewhere.
        lengths: [R] tokens of each response.
        kl_coefficient: reward lost per nat.
        token_rewards: [T] or None; unread outside the mask.

    Returns:
        [T] in the dtype of `kl_per_token`. If a tool wrote the last tokens of a response, its score is before them, at
        the policy's last action.
    """
    ends = _last_in_mask(mask, lengths)
    penalty = torch.where(mask, kl_per_token, 0) * kl_coefficient
    if token_rewards is None:
        return torch.where(ends, broadcast_to_tokens(scores, lengths).to(penalty.dtype), 0) - penalty
    earned = torch.where(mask, token_rewards, 0).double()
    left = scores - segment_sum(earned, lengths)
    return (earned + torch.where(ends, broadcast_to_tokens(left, lengths), 0)).to(penalty.dtype) - penalty


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRewards:
    """What an estimator of advantages is given: R responses of a step, with T tokens in all."""

    rewards: Float[Tensor, "tokens"]
    """Reward of each token: its part of the shaped score, and the KL where that is in the reward."""
    mask: Bool[Tensor, "tokens"]
    """True where the policy wrote the token and its response trains; nothing is read elsewhere."""
    lengths: Sequence[int]
    """Tokens of each response."""
    group_ids: Int[Tensor, "responses"]
    """Equal for the responses to one prompt."""
    counted: Bool[Tensor, "responses"]
    """True where a response enters baselines."""
    values: Float[Tensor, "states"] | None
    """[T + R] the value before each token, and one more per response after its last; None without a critic."""
    bootstrap: Bool[Tensor, "responses"]
    """True where the value after the last token stands for a future that was cut off."""
    turns: Int[Tensor, "tokens"]
    """The number from 0 of the turn in which the policy wrote the token; -1 where it did not. 0 without turns."""
    old_logprobs: Float[Tensor, "tokens"]
    """Of the policy before the updates of the step."""
    reference_logprobs: Float[Tensor, "tokens"] | None
    """Of the reference; None without one."""

    @property
    def whole_returns(self) -> Float[Tensor, "responses"]:
        """The sum of the rewards of each response."""
        return segment_sum(self.rewards, self.lengths)

    @property
    def num_tokens(self) -> Int[Tensor, "responses"]:
        """Tokens of the policy in each response; those of tools do not count."""
        return segment_sum(self.mask.long(), self.lengths)

    def to_tokens(self, per_response: Shaped[Tensor, "responses"]) -> Shaped[Tensor, "tokens"]:
        """Gives each token its response's number."""
        return broadcast_to_tokens(per_response, self.lengths)


@torch.no_grad()
def gae(
    rewards: Float[Tensor, "tokens"],
    values: Float[Tensor, "states"],
    mask: Bool[Tensor, "tokens"],
    lengths: Sequence[int],
    *,
    bootstrap: Bool[Tensor, "responses"],
    gamma: float,
    lam: float | Float[Tensor, "responses"],
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16), for all responses at once.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}

    t runs over the tokens in the mask. Tokens that a tool wrote between two turns are skipped without a discount.

    Args:
        rewards: [T] flat over the tokens of R responses.
        values: [T + R] V_t before each token, and one more per response after its last.
        mask: [T] bool, True where the policy wrote the token; nothing is read elsewhere.
        lengths: [R] tokens of each response.
        bootstrap: [R] bool, True where the value after the last token estimates a future that was cut off. False
            where the policy ended the answer, or where the limit is part of the task: that value is then 0.
        gamma: discount per token.
        lam: 1 trusts the rewards (no bias), 0 the values (little variance); one number, or [R] one per response.

    Returns:
        (advantages [T], returns [T] = advantages + values), both 0 outside the mask.

    Raises:
        ValueError: the values are not one more per response than the rewards.
    """
    if len(values) != len(rewards) + len(lengths):
        raise ValueError(
            f"gae needs one value per token and one more per response, {len(rewards)} + {len(lengths)}; got "
            f"{len(values)}: was the value after each last token left out?"
        )
    final_values = torch.where(bootstrap, values[final_value_positions(lengths, device=values.device)], 0)
    token_values = values[value_positions(lengths, device=values.device)]
    if goes_by_scan(rewards):
        options = {"final_values": final_values, "gamma": gamma, "lam": lam}
        advantages = advantages_by_scan(rewards, token_values, mask, lengths, **options)
    else:
        kept_lengths = segment_sum(mask.long(), lengths).tolist()
        deltas = _deltas(rewards[mask], token_values[mask], final_values, kept_lengths, gamma)
        advantages = deltas.new_zeros(len(rewards))
        advantages[mask] = _discounted_sums(deltas, kept_lengths, gamma * lam)
    return advantages, torch.where(mask, advantages + token_values, 0)


def _deltas(rewards: Tensor, values: Tensor, final_values: Tensor, lengths: Sequence[int], gamma: float) -> Tensor:
    """[T] r_t + gamma * V_{t+1} - V_t, with `final_values` [R] after each last token."""
    owners = segment_ids(lengths, device=values.device)
    counts = torch.tensor(lengths, dtype=torch.long, device=values.device)
    is_last = token_positions(lengths, device=values.device) + 1 == counts[owners]
    next_values = torch.where(is_last, final_values[owners], values.roll(-1))
    return rewards + gamma * next_values - values


def _discounted_sums(x: Tensor, lengths: Sequence[int], decay: float | Tensor) -> Tensor:
    """[T] y_t = x_t + decay * y_{t+1} within each response: one pass over time for all responses together.

    `decay` is one number, or [R].
    """
    columns = segment_rows(x, lengths).T.contiguous()
    times = columns.unbind(0)
    for now, later in zip(reversed(times[:-1]), reversed(times[1:]), strict=True):
        now.add_(later * decay)
    return columns[token_positions(lengths, device=x.device), segment_ids(lengths, device=x.device)]


def length_adaptive_lam(num_tokens: Shaped[Tensor, "responses"], *, alpha: float) -> Float[Tensor, "responses"]:
    """lambda = 1 - 1 / (alpha * tokens), at least 0 (VAPO, arXiv:2504.05118): [R] from [R].

    The powers of lambda then sum to about alpha * tokens: every response looks ahead over the same share of itself,
    however long it is. One of 1 / alpha tokens or fewer looks a single step ahead.
    """
    return (1 - 1 / (alpha * num_tokens)).clamp(min=0)


def gae_with_lambdas(
    step: StepRewards,
    *,
    gamma: float,
    gae_lambda: float,
    length_adaptive: float | None = None,
    value_gae_lambda: float | None = None,
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """`gae` with a lambda of each response (alpha `length_adaptive`) and another one for the returns (VAPO).

    Source: arXiv:2504.05118. Raises ValueError as `gae` does, and without values.
    """
    values = step.values
    if values is None:
        raise ValueError("advantage gae needs values")

    def with_lam(lam: float | Tensor) -> tuple[Tensor, Tensor]:
        return gae(step.rewards, values, step.mask, step.lengths, bootstrap=step.bootstrap, gamma=gamma, lam=lam)

    lam: float | Tensor = gae_lambda
    if length_adaptive is not None:
        lam = length_adaptive_lam(step.num_tokens.to(step.rewards.dtype), alpha=length_adaptive)
    advantages, returns = with_lam(lam)
    return advantages, returns if value_gae_lambda is None else with_lam(value_gae_lambda)[1]


@torch.no_grad()
def returns_to_go(
    rewards: Float[Tensor, "tokens"], mask: Bool[Tensor, "tokens"], lengths: Sequence[int], *, gamma: float
) -> Float[Tensor, "tokens"]:
    """[T] G_t = r_t + gamma * G_{t+1} over the tokens in the mask, 0 outside: REINFORCE without a baseline.

    Standardised over the batch it is REINFORCE++ (arXiv:2501.03262). Arguments as in `gae`.
    """
    if goes_by_scan(rewards):
        return returns_by_scan(rewards, mask, lengths, gamma=gamma)
    to_go = rewards.new_zeros(len(rewards))
    to_go[mask] = _discounted_sums(rewards[mask], segment_sum(mask.long(), lengths).tolist(), gamma)
    return to_go


@torch.no_grad()
def discounted_returns(
    rewards: Float[Tensor, "tokens"], mask: Bool[Tensor, "tokens"], lengths: Sequence[int], *, gamma: float
) -> Float[Tensor, "responses"]:
    """[R] the discounted return of each response: G_0 of `returns_to_go`, 0 without a masked token."""
    to_go = returns_to_go(rewards, mask, lengths, gamma=gamma)
    return segment_sum(torch.where(_first_in_mask(mask, lengths), to_go, 0), lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReturnSpread:
    """The spread of the returns of a step, and that of the whole run.

    On a solved task all responses earn the same, so advantages are the errors of the critic. Standardising enlarges
    them to updates of full size. Smaller advantages would not help: AdamW divides by the size of recent gradients,
    which cancels any lasting factor (docs/ppo.md, "Steps with nearly equal returns").
    """

    deviation: float
    """Standard deviation of the step's returns: the total reward of each response, with KL, before whitening."""
    seen: RunningMoments
    """Of all returns of the run so far, this step's included."""
    is_flat: bool
    """True if the step has no signal: its deviation is at most the fraction `least` of the run's."""


def return_spread(
    rewards: Float[Tensor, "tokens"],
    mask: Bool[Tensor, "tokens"],
    lengths: Sequence[int],
    *,
    gamma: float,
    least: float | None,
    seen: RunningMoments,
) -> ReturnSpread:
    """The spread from the rewards [T] of a step, read only inside the mask [T], and the returns of earlier steps.

    A step with fewer than two counted responses has no spread and is not flat. No step is flat if `least` is None.
    While the returns of the whole run have no spread, every step is flat.
    """
    wrote = [bool(part.any()) for part in mask.split(list(lengths))]
    returns = discounted_returns(rewards.double(), mask, lengths, gamma=gamma)[torch.tensor(wrote)]
    seen = update_moments(seen, returns)
    deviation = returns.std(correction=0).item() if len(returns) else 0.0
    is_flat = False
    if least is not None and len(returns) > 1:
        is_flat = seen.deviation is None or deviation <= least * seen.deviation
    return ReturnSpread(deviation=deviation, seen=seen, is_flat=is_flat)


def _first_in_mask(mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """[T] bool: True at the first masked token of each response, if it has one."""
    counts = segment_sum(mask.long(), lengths)
    counts_before = counts.cumsum(0) - counts
    return mask & (mask.cumsum(0) == counts_before[segment_ids(lengths, device=mask.device)] + 1)


def goes_by_scan(x: Tensor) -> bool:
    """True on accelerators. On a CPU the loop over time is equally fast, and keeps the bits of its sums."""
    return x.device.type != "cpu"


def _last_in_mask(mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """[T] bool: True at the last masked token of each response, if it has one."""
    counts_at_end = segment_sum(mask.long(), lengths).cumsum(0)
    return mask & (mask.cumsum(0) == counts_at_end[segment_ids(lengths, device=mask.device)])
