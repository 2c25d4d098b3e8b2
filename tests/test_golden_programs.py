"""Golden numbers of the programs that this one unites, for what is not a formula alone: heads, endings, averages, sums.

Those of formulas are in algorithms/test_golden_vectors.py, of the split in data/test_data_split.py.
"""

import pytest
import torch
from torch import nn

from builders import tiny_tokenizer
from proximo.algorithms.losses import clipped_value_loss, policy_statistics, value_statistics
from proximo.algorithms.masking import masked_mean
from proximo.algorithms.objectives import ppo
from proximo.config.ppo.options import PPOConfig
from proximo.models.heads import OutputHead, token_logprobs
from proximo.models.packing import pack
from proximo.ppo.roles.worker import follow
from proximo.ppo.update.losses import joint_loss
from proximo.records import Finish
from proximo.rollout.sampling import SamplingOptions
from proximo.rollout.stopping import StopRules

LOGITS = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]])
SAME = OutputHead(weight=torch.eye(3))
"""Hidden states are the logits."""


@pytest.mark.parametrize(("temperature", "wanted"), [(1.0, [-0.407606, -1.551445]), (0.5, [-0.142932, -2.239545])])
def test_log_probs_at_a_temperature(temperature: float, wanted: list[float]) -> None:
    """torchtune's vector."""
    found = token_logprobs(LOGITS, SAME, torch.tensor([2, 0]), temperature=temperature)
    assert found.logprobs.tolist() == pytest.approx(wanted, abs=1e-5)


def test_entropy() -> None:
    """TRL's vector."""
    found = token_logprobs(LOGITS[:1], SAME, torch.tensor([0]), entropy=True)
    assert found.entropy is not None
    assert found.entropy.item() == pytest.approx(0.832396, abs=1e-5)


@pytest.mark.parametrize(
    ("written", "num_tokens", "finish"),
    [
        ([5, 6, 2], 3, Finish.STOP),
        ([5, 2, 7], 2, Finish.STOP),
        ([5, 6, 7], 3, Finish.LENGTH),
        ([2, 3, 4], 1, Finish.STOP),
    ],
)
def test_a_stop_token_ends_a_response_and_stays(written: list[int], num_tokens: int, finish: Finish) -> None:
    """torchtune's rows, which are written in full there and cut afterwards: its last indices are [2, 1, 2, 0]."""
    options = SamplingOptions(max_new_tokens=3, stop_token_ids=(2,))
    rules = StopRules(options=options, eos_token_ids=(), tokenizer=tiny_tokenizer())
    ends = [rules.finish(written[:length], prompt_end=(), limit=3) for length in range(1, 4)]
    first = next(index for index, end in enumerate(ends) if end is not None)
    assert (first + 1, ends[first]) == (num_tokens, finish)


def test_a_step_of_the_moving_average() -> None:
    """DeepSpeed-Chat's: from 1 towards 0 with decay 0.992."""
    average, policy = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    nn.init.ones_(average.weight)
    nn.init.zeros_(policy.weight)
    follow(average, policy, decay=0.992)
    assert average.weight.item() == pytest.approx(0.992)


LOGPROBS = [-1, -2, -0.5, -0.3, -0.7]
MOVED = [0.1, -0.3, 0.5, 0, 0.25]
VALUES = [0.1, 0.2, 0.3, 0.5, 0.4]
VALUES_MOVED = [0.3, -0.1, 0.05, -0.5, 0.1]


@pytest.mark.parametrize(
    ("advantages", "returns", "one_more", "total"),
    [
        (
            [0.797594, 0.777279, 0.610216, -1.095016, -1.090073],
            [0.90955, 0.989, 0.92, -0.605, -0.7],
            ([], [], []),
            0.098486,
        ),
        (
            [0.800113, 0.777081, 0.600844, -1.097965, -1.090617],
            [0.875706, 0.953375, 0.8825, -0.564625, -0.6575],
            ([0.25, 0.35], [0.4, 0.0], [1.0, -0.5]),
            0.095305,
        ),
    ],
    ids=["TRL", "torchtune, which trains one value more of each response"],
)
def test_the_loss_of_a_shared_trunk_is_that_of_trl_and_torchtune(
    advantages: list[float], returns: list[float], one_more: tuple[list[float], ...], total: float
) -> None:
    """Policy loss + 0.1 * value loss, each the mean over its own tokens; the weight is the default here too."""
    old_logprobs, moved = (torch.tensor(row, dtype=torch.float64) for row in (LOGPROBS, MOVED))
    mask = torch.ones(5, dtype=torch.bool)
    clipped = ppo(old_logprobs + moved, old_logprobs, torch.tensor(advantages), clip_low=0.2, clip_high=0.2)
    policy = policy_statistics(old_logprobs + moved, old_logprobs, clipped.clipped, mask)

    old_values = torch.tensor(VALUES + one_more[0], dtype=torch.float64)
    values = old_values + torch.tensor(VALUES_MOVED + one_more[1])
    targets = torch.tensor(returns + one_more[2])
    of_values = clipped_value_loss(values, old_values, targets, clip=0.2).mean()
    value = value_statistics(values, old_values, targets, torch.ones(len(values), dtype=torch.bool), clip=0.2)

    weight = PPOConfig().value_loss.weight
    loss, _ = joint_loss((masked_mean(clipped.loss, mask), policy), (of_values, value), coefficient=weight)
    assert loss.item() == pytest.approx(total, abs=1e-5)


def test_a_pair_is_scored_at_its_own_last_tokens() -> None:
    """DeepSpeed-Chat's pair, whose ends it finds by the pad token: 0.6 and 0.7."""
    pair = pack([[3, 4, 5, 6], [3, 4, 7]])
    scores = torch.tensor([0.3, 0.4, 0.5, 0.6, 0.3, 0.4, 0.7])
    assert scores[pair.last_indices].tolist() == pytest.approx([0.6, 0.7])
