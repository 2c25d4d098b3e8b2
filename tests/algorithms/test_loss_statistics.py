"""What is counted about the losses: definitions, sums over micro-batches, no or one valid token."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from proximo.algorithms.losses import (
    PolicyStatistics,
    ValueStatistics,
    explained_variance,
    policy_statistics,
    value_statistics,
)
from proximo.algorithms.objectives import ppo
from proximo.ppo.update.epochs import policy_metrics

N = 12
GENERATOR = torch.Generator().manual_seed(0)
A, B, C = torch.randn(3, N, generator=GENERATOR, dtype=torch.float64)
MASK = torch.rand(N, generator=GENERATOR) > 0.3
NOWHERE = torch.zeros(N, dtype=torch.bool)


def of_policy(part: slice | Tensor = slice(None), mask: Tensor = MASK) -> PolicyStatistics:
    clipped = ppo(A[part], B[part], C[part], clip_low=0.2, clip_high=0.28).clipped
    return policy_statistics(A[part], B[part], clipped, mask[part])


def of_values(part: slice | Tensor = slice(None), mask: Tensor = MASK) -> ValueStatistics:
    return value_statistics(A[part], B[part], C[part], mask[part], clip=0.2)


def tensors(statistics: PolicyStatistics | ValueStatistics) -> dict[str, torch.Tensor]:
    """By name; `others` of policy statistics are what a loss adds beside them."""
    return {f.name: getattr(statistics, f.name) for f in fields(statistics) if f.name != "others"}


def numbers(statistics: PolicyStatistics | ValueStatistics) -> dict[str, float]:
    return {name: tensor.item() for name, tensor in tensors(statistics).items()}


def test_what_only_one_loss_measures_adds_up_too() -> None:
    """As the sums of pairs, and of the full KL."""
    first, second = (
        replace(policy_statistics(A, B, NOWHERE, MASK), others={"pairs": torch.tensor(count)}) for count in (2.0, 3.0)
    )
    assert (first + second).others == {"pairs": torch.tensor(5.0)}


def test_the_effective_sample_size_is_that_of_torchrl_as_a_share() -> None:
    """exp(2 logsumexp(w) - logsumexp(2 w)) / n of the log-ratios w of the tokens that count."""
    log_ratios, mask = torch.tensor([0.1, -0.3, 0.5, 9.0, 0.25]), torch.tensor([True, True, True, False, True])
    statistics = policy_statistics(log_ratios - 1, torch.full((5,), -1.0), torch.zeros(5, dtype=torch.bool), mask)
    kept = log_ratios[mask].double()
    wanted = (2 * kept.logsumexp(0) - (2 * kept).logsumexp(0)).exp().item() / 4
    assert policy_metrics(statistics)["policy/effective_sample_size"].value == pytest.approx(wanted, rel=1e-6)
    assert wanted == pytest.approx(0.93024, abs=1e-5)


def test_policy_statistics_are_sums_over_the_mask():
    kept = [(A[i] - B[i], C[i]) for i in range(N) if MASK[i]]
    ratios = [d.exp() for d, _ in kept]
    wanted = {
        "num_tokens": len(kept),
        "clipped": sum((r > 1.28 and a > 0) or (r < 0.8 and a < 0) for r, (_, a) in zip(ratios, kept, strict=True)),
        "ratio": sum(ratios),
        "ratio_squared": sum(r * r for r in ratios),
        "k3": sum(r - 1 - d for r, (d, _) in zip(ratios, kept, strict=True)),
        "abs_log_ratio": sum(abs(d) for d, _ in kept),
        "max_abs_log_ratio": max(abs(d) for d, _ in kept),
    }
    assert 0 < wanted["clipped"] < len(kept)
    assert numbers(of_policy()) == pytest.approx({name: float(value) for name, value in wanted.items()})


def test_value_statistics_are_sums_over_the_mask():
    kept = [i for i in range(N) if MASK[i]]
    near = [min(max(A[i], B[i] - 0.2), B[i] + 0.2) for i in range(N)]
    clipped = sum((near[i] - C[i]) ** 2 > (A[i] - C[i]) ** 2 for i in kept)
    assert 0 < clipped < len(kept)
    assert numbers(of_values()) == {"num_tokens": len(kept), "clipped": clipped}


@pytest.mark.parametrize("compute", [of_policy, of_values])
@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_statistics_of_micro_batches_add_up_to_those_of_the_whole(compute, size):
    parts = [compute(slice(start, start + size)) for start in range(0, N, size)]
    total = sum(parts[1:], parts[0])
    assert numbers(total) == pytest.approx(numbers(compute()), rel=1e-12)


@pytest.mark.parametrize("compute", [of_policy, of_values])
def test_no_valid_token_gives_zeros(compute):
    assert set(numbers(compute(mask=torch.zeros(N, dtype=torch.bool))).values()) == {0}
    assert set(numbers(compute(slice(0, 0))).values()) == {0}


def test_the_largest_log_ratio_is_found_on_either_side():
    for new, old in ((A, B), (B, A)):
        found = policy_statistics(new, old, NOWHERE, MASK).max_abs_log_ratio
        assert found == (A - B)[MASK].abs().max()


def test_an_unchanged_policy_has_ratio_one_and_nothing_clipped():
    found = policy_statistics(A, A, ppo(A, A, C, clip_low=0.0, clip_high=0.0).clipped, MASK)
    count = found.num_tokens.item()
    assert numbers(found) == {"num_tokens": count, "ratio": count, "ratio_squared": count} | dict.fromkeys(
        ("clipped", "k3", "abs_log_ratio", "max_abs_log_ratio"), 0
    )
    assert value_statistics(A, A, C, MASK, clip=0.0).clipped == value_statistics(A, B, C, MASK, clip=None).clipped == 0


def test_the_kl_estimate_is_of_the_old_policy_from_the_new():
    """Over tokens of the old policy the mean of k3 is that KL: summed over a vocabulary with the old chances."""
    new, old = (x.log_softmax(-1) for x in torch.randn(2, 50, generator=GENERATOR, dtype=torch.float64))
    wanted = (old.exp() * (old - new)).sum().item()
    everything = torch.ones(1, dtype=torch.bool)
    singles = [policy_statistics(new[i : i + 1], old[i : i + 1], NOWHERE[:1], everything) for i in range(50)]
    estimate = sum(old[i].exp() * singles[i].k3 for i in range(50))
    assert estimate.item() == pytest.approx(wanted, abs=1e-12)


def test_statistics_carry_no_gradient():
    x = A.clone().requires_grad_()
    found = policy_statistics(x, B, ppo(x, B, C, clip_low=0.2, clip_high=0.2).clipped, MASK)
    assert not any(tensor.requires_grad for tensor in tensors(found).values())
    assert not explained_variance(x, C, MASK).requires_grad


def test_explained_variance_of_perfect_constant_and_opposite_values():
    assert explained_variance(C, C, MASK) == 1
    assert explained_variance(C + 5, C, MASK).item() == pytest.approx(1)
    assert explained_variance(torch.full_like(C, 3.0), C, MASK).item() == pytest.approx(0, abs=1e-12)
    assert explained_variance(-C, C, MASK).item() == pytest.approx(-3)
    assert explained_variance(A, torch.full_like(A, 0.1), ~NOWHERE) == 0, "of constant returns"
    for num_valid in (0, 1):
        assert explained_variance(A, C, torch.arange(N) < num_valid) == 0
