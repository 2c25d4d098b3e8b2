"""GAE against its definition as a double sum, its reductions, and what masks and lengths must not change."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from proximo.algorithms.advantages import gae
from proximo.algorithms.masking import value_positions

LENGTHS = (4, 1, 6, 3)


def batch(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values, a mask with holes; float64."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    rewards = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    values = torch.randn(num_tokens + len(lengths), generator=generator, dtype=torch.float64)
    return rewards, values, torch.rand(num_tokens, generator=generator) > 0.3


def all_true(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.bool)


def by_definition(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, for one response without holes; values have one more."""
    n = len(rewards)
    deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, n)) for t in range(n)]


def expected(rewards, values, mask, *, lengths, bootstrap, gamma, lam) -> tuple[list[float], list[float]]:
    """The definition on the tokens of the mask alone, response by response."""
    advantages, returns = [], []
    for row, length in enumerate(lengths):
        start = sum(lengths[:row])
        kept = [t for t in range(length) if mask[start + t]]
        own = [values[start + row + t].item() for t in kept] + [values[start + row + length].item() * bootstrap[row]]
        found = iter(by_definition([rewards[start + t].item() for t in kept], own, gamma, lam))
        for t in range(length):
            advantages.append(next(found) if t in kept else 0.0)
            returns.append(advantages[-1] + values[start + row + t].item() if t in kept else 0.0)
    return advantages, returns


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.97, 0.0), (0.0, 0.3)])
@pytest.mark.parametrize("with_holes", [False, True])
def test_matches_the_definition_as_a_double_sum(gamma, lam, with_holes):
    rewards, values, mask = batch()
    mask = mask if with_holes else all_true(len(mask))
    bootstrap = torch.tensor([True, False, True, False])
    found = gae(rewards, values, mask, LENGTHS, bootstrap=bootstrap, gamma=gamma, lam=lam)
    wanted = expected(rewards, values, mask, lengths=LENGTHS, bootstrap=bootstrap.tolist(), gamma=gamma, lam=lam)
    torch.testing.assert_close(found[0], torch.tensor(wanted[0], dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1], torch.tensor(wanted[1], dtype=torch.float64), rtol=0, atol=1e-12)


def test_a_response_gets_the_same_bits_alone_and_in_any_company():
    lengths = (5, 64, 1, 17, 0, 33, 9)
    rewards, values, mask = (x.float() if x.is_floating_point() else x for x in batch(lengths, seed=3))
    bootstrap = torch.tensor([True, False] * 3 + [True])
    together = gae(rewards, values, mask, lengths, bootstrap=bootstrap, gamma=0.99, lam=0.95)
    value_lengths = [length + 1 for length in lengths]
    parts = zip(rewards.split(lengths), values.split(value_lengths), mask.split(lengths), lengths, strict=True)
    alone = [
        gae(r, v, m, (n,), bootstrap=bootstrap[i : i + 1], gamma=0.99, lam=0.95) for i, (r, v, m, n) in enumerate(parts)
    ]
    for which in (0, 1):
        assert together[which].equal(torch.cat([found[which] for found in alone]))


def test_empty_and_fully_masked_responses_change_no_other():
    rewards, values, _ = batch((2, 3))
    options = {"gamma": 1.0, "lam": 0.95}
    wanted, _ = gae(rewards[:2], values[:3], all_true(2), (2,), bootstrap=all_true(1), **options)
    mask = torch.tensor([True, True, False, False, False])
    padded_values = torch.cat([values[:3], values[:1], values[3:]])
    found, returns = gae(rewards, padded_values, mask, (2, 0, 3), bootstrap=all_true(3), **options)
    assert found.equal(torch.cat([wanted, torch.zeros(3, dtype=torch.float64)]))
    assert not returns[2:].any()


def test_the_results_carry_no_gradient():
    rewards, values, mask = batch()
    found = gae(rewards, values.requires_grad_(), mask, LENGTHS, bootstrap=all_true(4), gamma=1.0, lam=0.95)
    assert not any(x.requires_grad for x in found)


def test_values_without_the_last_one_are_refused():
    rewards, values, mask = batch()
    token_values = values[value_positions(LENGTHS)]
    with pytest.raises(ValueError, match=r"14 \+ 4; got 14"):
        gae(rewards, token_values, mask, LENGTHS, bootstrap=all_true(4), gamma=1.0, lam=0.95)


class CountOperations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("per_response", [False, True])
def test_the_work_grows_with_the_longest_response_and_not_with_their_number(per_response):
    counts = []
    for num_responses in (2, 200):
        lengths = (10,) * num_responses
        rewards, values, _ = batch(lengths)
        everything, cut = all_true(len(rewards)), all_true(num_responses)
        lam = torch.linspace(0, 1, num_responses, dtype=torch.float64) if per_response else 1.0
        with CountOperations() as counter:
            gae(rewards, values, everything, lengths, bootstrap=cut, gamma=1.0, lam=lam)
        counts.append(counter.count)
    assert counts[0] == counts[1] > 10
