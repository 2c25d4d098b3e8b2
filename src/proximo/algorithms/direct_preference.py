"""Direct preference optimisation: losses of a language model from preference pairs, one number per pair.

N pairs. A log-ratio is the log-prob of a whole answer, summed over its tokens, under the policy minus that under the
reference.
"""

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid


def implicit_rewards(log_ratios: Float[Tensor, "*shape"], *, beta: float) -> Float[Tensor, "*shape"]:
    """beta log(pi / pi_ref), in the shape given: the reward that the policy is the best answer to, up to a constant of
    the prompt (arXiv:2305.18290, eq. 5)."""
    return beta * log_ratios


def dpo_loss(
    chosen_log_ratios: Float[Tensor, "pairs"],
    rejected_log_ratios: Float[Tensor, "pairs"],
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Float[Tensor, "pairs"]:
    """-(1 - eps) log sigmoid(x) - eps log sigmoid(-x) with x the difference of implicit rewards, [N] from [N].

    With eps = 0 it is the loss of arXiv:2305.18290, eq. 7. eps is the assumed fraction of pairs with swapped
    labels (conservative DPO, E. Mitchell, 2023, "A note on DPO with noisy preferences"): the loss is then
    lowest at x = log((1 - eps) / eps) and grows beyond; with eps = 0 it always falls with x.
    """
    gap = implicit_rewards(chosen_log_ratios, beta=beta) - implicit_rewards(rejected_log_ratios, beta=beta)
    return -(1 - label_smoothing) * logsigmoid(gap) - label_smoothing * logsigmoid(-gap)


def ipo_loss(
    chosen_log_ratios: Float[Tensor, "pairs"], rejected_log_ratios: Float[Tensor, "pairs"], *, beta: float
) -> Float[Tensor, "pairs"]:
    """(h - 1 / (2 beta))^2 with h the difference of log-ratios, [N] from [N] (IPO, arXiv:2310.12036, eq. 17).

    The gap is drawn to a fixed width; the loss of DPO widens it for as long as the pairs agree. Log-ratios are of
    whole answers, as in the paper. With means over tokens, as in TRL, beta has another meaning.
    """
    return (chosen_log_ratios - rejected_log_ratios - 1 / (2 * beta)).square()
