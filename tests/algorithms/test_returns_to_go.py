"""Returns to go, alone and beside those of the group: REINFORCE++ without and with a baseline."""

from statistics import mean

import pytest
import torch
from torch import Tensor

from proximo.algorithms.advantages import returns_to_go
from proximo.algorithms.group_baselines import group_centred, group_returns_to_go
from proximo.algorithms.masking import broadcast_to_tokens

LENGTHS = (3, 1, 4, 0, 2)
GROUPS = torch.tensor([7, 3, 7, 3, 3])
COUNTS = torch.tensor([True, True, True, False, True])
REWARDS = torch.randn(10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MASK = torch.tensor([True, True, True, True, True, False, True, True, False, True])
NAN = float("nan")


def all_true(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.bool)


def by_definition(gamma: float) -> list[list[float | None]]:
    """G_t as a sum over the later tokens of the response that count; None where one does not. Response by response."""
    found: list[list[float | None]] = []
    for rewards, mask in zip(REWARDS.split(LENGTHS), MASK.split(LENGTHS), strict=True):
        kept = [float(r) for r, m in zip(rewards, mask, strict=True) if m]
        sums = iter([sum(gamma**k * r for k, r in enumerate(kept[t:])) for t in range(len(kept))])
        found.append([next(sums) if m else None for m in mask.tolist()])
    return found


def flat(rows: list[list[float | None]]) -> Tensor:
    return torch.tensor([0.0 if x is None else x for row in rows for x in row], dtype=torch.float64)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_matches_the_definition_as_a_sum_and_skips_what_a_tool_wrote(gamma):
    found = returns_to_go(torch.where(MASK, REWARDS, NAN), MASK, LENGTHS, gamma=gamma)
    torch.testing.assert_close(found, flat(by_definition(gamma)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_the_baseline_is_the_mean_over_the_group_of_what_the_first_token_sees(gamma):
    rows = by_definition(gamma)
    starts = [next((x for x in row if x is not None), None) for row in rows]
    baselines = {7: mean([starts[0], starts[2]]), 3: mean([starts[1], starts[4]])}
    wanted = [
        [None if x is None else x - baselines[int(group)] for x in row]
        for row, group in zip(rows, GROUPS.tolist(), strict=True)
    ]
    found = group_returns_to_go(torch.where(MASK, REWARDS, NAN), GROUPS, COUNTS, MASK, LENGTHS, gamma=gamma)
    torch.testing.assert_close(found, flat(wanted), rtol=0, atol=1e-12)


def test_with_one_reward_at_the_end_it_is_the_centred_score_to_the_bit():
    scores, lengths = torch.tensor([0.1, 0.7, 1 / 3, 1 / 3, 1 / 3]), (2, 3, 1, 2, 4)
    groups = torch.tensor([0, 0, 1, 1, 1])
    ends = torch.tensor([1, 4, 5, 7, 11])
    rewards = torch.zeros(12).index_put((ends,), scores)
    found = group_returns_to_go(rewards, groups, all_true(5), all_true(12), lengths, gamma=1.0)
    assert found.equal(broadcast_to_tokens(group_centred(scores, groups, all_true(5)), lengths))
    assert not found[5:].any()
