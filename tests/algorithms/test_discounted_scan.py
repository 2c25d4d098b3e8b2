"""The scan that accelerators take, against the loop that a CPU takes; and that nothing of it is waited for."""

import pytest
import torch
from torch import Tensor

from fake_cuda import CUDA, fake_cuda
from proximo.algorithms import advantages
from proximo.algorithms.advantages import gae, returns_to_go
from proximo.algorithms.discounted_scan import scan_back
from proximo.algorithms.group_baselines import group_returns_to_go

LENGTHS = (5, 64, 1, 17, 0, 33, 9)


@pytest.fixture
def by_scan(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(advantages, "goes_by_scan", lambda _: True)
    return monkeypatch


def batch(dtype: torch.dtype = torch.float64, *, seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)
    values = torch.randn(sum(LENGTHS) + len(LENGTHS), generator=generator, dtype=torch.float64)
    return rewards.to(dtype), values.to(dtype), torch.rand(sum(LENGTHS), generator=generator) > 0.3


def poisoned(rewards: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, rewards, torch.nan)


BOOTSTRAP = torch.tensor([True, False, True, True, False, False, True])
LAMS = torch.tensor([0.95, 1.0, 0.3, 0.0, 0.5, 0.9, 0.99], dtype=torch.float64)


@pytest.mark.parametrize("lam", [0.95, 1.0, 0.0, LAMS], ids=["0.95", "1", "0", "each its own"])
@pytest.mark.parametrize("gamma", [1.0, 0.97])
@pytest.mark.parametrize("with_holes", [False, True])
def test_the_scan_is_the_loop(by_scan: pytest.MonkeyPatch, gamma: float, lam: float | Tensor, with_holes: bool) -> None:
    rewards, values, mask = batch()
    mask = mask if with_holes else torch.ones_like(mask)
    options = {"bootstrap": BOOTSTRAP, "gamma": gamma, "lam": lam}
    found = gae(poisoned(rewards, mask), values, mask, LENGTHS, **options)
    by_scan.undo()
    wanted = gae(rewards, values, mask, LENGTHS, **options)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
        assert not mine[~mask].any()


def test_in_float32_they_differ_by_rounding(by_scan: pytest.MonkeyPatch) -> None:
    rewards, values, mask = batch(torch.float32)
    options = {"bootstrap": BOOTSTRAP, "gamma": 1.0, "lam": 0.95}
    found = gae(rewards, values, mask, LENGTHS, **options)
    by_scan.undo()
    wanted = gae(rewards, values, mask, LENGTHS, **options)
    for mine, other in zip(found, wanted, strict=True):
        assert mine.dtype is torch.float32
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_returns_to_go_likewise(by_scan: pytest.MonkeyPatch) -> None:
    rewards, _, mask = batch()
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 2])
    found = (
        returns_to_go(poisoned(rewards, mask), mask, LENGTHS, gamma=0.9),
        group_returns_to_go(rewards, groups, BOOTSTRAP, mask, LENGTHS, gamma=0.9),
    )
    by_scan.undo()
    wanted = (
        returns_to_go(rewards, mask, LENGTHS, gamma=0.9),
        group_returns_to_go(rewards, groups, BOOTSTRAP, mask, LENGTHS, gamma=0.9),
    )
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("by_scan")
def test_a_response_gets_the_same_bits_alone_and_in_any_company() -> None:
    rewards, values, mask = batch(torch.float32)
    options = {"gamma": 0.99, "lam": 0.95}
    together = gae(rewards, values, mask, LENGTHS, bootstrap=BOOTSTRAP, **options)
    pieces = zip(rewards.split(LENGTHS), values.split([n + 1 for n in LENGTHS]), mask.split(LENGTHS), strict=True)
    for row, (own, own_values, own_mask) in enumerate(pieces):
        alone = gae(own, own_values, own_mask, LENGTHS[row : row + 1], bootstrap=BOOTSTRAP[row : row + 1], **options)
        for which in (0, 1):
            assert together[which].split(LENGTHS)[row].equal(alone[which])


@pytest.mark.usefixtures("by_scan")
@pytest.mark.parametrize("lengths", [(), (0, 0), (1,), (0, 1)])
def test_none_and_one_token_are_no_error(lengths: tuple[int, ...]) -> None:
    count = sum(lengths)
    values, mask = torch.ones(count + len(lengths)), torch.ones(count, dtype=torch.bool)
    bootstrap = torch.zeros(len(lengths), dtype=torch.bool)
    found, returns = gae(torch.full((count,), 3.0), values, mask, lengths, bootstrap=bootstrap, gamma=1.0, lam=1.0)
    assert found.tolist() == [2.0] * count
    assert returns.tolist() == [3.0] * count


def test_a_scan_by_hand() -> None:
    found = scan_back(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0.5, 0.25, 9.0, 9.0]), (3, 1))
    assert found.tolist() == [1 + 0.5 * (2 + 0.25 * 4), 2 + 0.25 * 4, 4.0, 8.0]


def test_on_an_accelerator_nothing_is_waited_for_and_the_rounds_are_the_logarithm() -> None:
    """A tensor without numbers raises where one is asked for, by the host or to know a size."""
    counts = []
    for longest in (64, 1024):
        lengths = (longest, 3, 17)
        with fake_cuda() as kernels:
            rewards, values = (torch.empty(sum(lengths) + more, device=CUDA) for more in (0, 3))
            mask, ends = (torch.empty(count, dtype=torch.bool, device=CUDA) for count in (sum(lengths), 3))
            found = gae(rewards, values, mask, lengths, bootstrap=ends, gamma=1.0, lam=0.95)
            to_go = returns_to_go(rewards, mask, lengths, gamma=1.0)
        assert found[0].device == found[1].device == to_go.device == CUDA
        counts.append(sum(kernels.operators.values()))
    assert counts[1] < 2 * counts[0]
