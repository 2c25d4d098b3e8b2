"""Group advantages that are no plain mean: of the best of k, and of the mean weighted by length."""

from itertools import combinations, product

import pytest
import torch

from proximo.algorithms.group_baselines import group_centred, length_weighted, pass_at_k

GROUPS = torch.tensor([4, 1, 4, 4, 1, 4, 7])
SCORES = torch.tensor([0.3, 2.0, -1.0, 0.3, 5.0, 1.7, 9.0], dtype=torch.float64)
VALID = torch.tensor([True, True, True, True, True, True, True])


def added(scores: list[float], place: int, k: int) -> float:
    """k times the mean over all sets of k - 1 others of what this one adds to their best."""
    others = [score for at, score in enumerate(scores) if at != place]
    sets = list(combinations(others, k - 1))
    return k * sum(max(scores[place] - max(each), 0.0) for each in sets) / len(sets)


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("invalid", [None, 0, 2])
def test_pass_at_k_is_what_a_response_adds_to_the_best_of_the_others_over_all_sets(k: int, invalid: int | None) -> None:
    valid = torch.arange(7) != invalid if invalid is not None else VALID
    found = pass_at_k(SCORES, GROUPS, valid, k=k)
    for group in (4, 1, 7):
        members = [i for i in range(7) if GROUPS[i] == group and valid[i]]
        scores = SCORES[members].tolist()
        wanted = [added(scores, place, k) if len(scores) >= k else 0.0 for place in range(len(scores))]
        assert found[members].tolist() == pytest.approx(wanted, abs=1e-12)
    assert found[~valid].tolist() == [0.0] * int((~valid).sum())


@pytest.mark.parametrize(("n", "k"), [(2, 2), (3, 2), (4, 3)])
def test_its_mean_gradient_is_that_of_the_expected_best_of_k(n: int, k: int) -> None:
    """Over all ways to draw n of four answers, each as often as the policy draws it."""
    scores = torch.tensor([0.0, 0.5, 0.5, 2.0], dtype=torch.float64)
    logits = torch.tensor([0.4, -0.3, 0.1, -1.0], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    best = sum(
        (logprobs[list(draw)].sum().exp() * scores[list(draw)].max() for draw in product(range(4), repeat=k)),
        start=torch.zeros((), dtype=torch.float64),
    )
    found = torch.zeros(4, dtype=torch.float64)
    for draw in map(list, product(range(4), repeat=n)):
        advantages = pass_at_k(scores[draw], torch.zeros(n, dtype=torch.long), torch.ones(n, dtype=torch.bool), k=k)
        (gradient,) = torch.autograd.grad((advantages * logprobs[draw]).mean(), logits, retain_graph=True)
        found += logprobs[draw].sum().exp().detach() * gradient
    (wanted,) = torch.autograd.grad(best, logits)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_equal_scores_add_nothing() -> None:
    found = pass_at_k(torch.full((3,), 0.1), torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.bool), k=2)
    assert found.tolist() == [0.0] * 3


def test_no_other_baseline_has_a_smaller_second_moment_weighted_by_length() -> None:
    """The variance of the gradient, where its square grows with the length, is least."""
    tokens = torch.tensor([3, 1, 5, 2], dtype=torch.float64)
    scores, group = SCORES[:4], torch.zeros(4, dtype=torch.long)
    baseline = (scores - length_weighted(scores, group, VALID[:4], num_tokens=tokens))[0]
    moments = [(tokens * (scores - baseline - shift).square()).sum() for shift in (-0.01, 0.0, 0.01)]
    assert moments[1] < min(moments[0], moments[2])


def test_with_one_length_it_is_the_plain_mean_and_equals_are_exactly_zero() -> None:
    tokens = torch.full((7,), 6)
    found = length_weighted(SCORES, GROUPS, VALID, num_tokens=tokens)
    torch.testing.assert_close(found, group_centred(SCORES, GROUPS, VALID))
    equal = length_weighted(torch.full((7,), 1 / 3), GROUPS, VALID, num_tokens=torch.arange(7))
    assert equal.tolist() == [0.0] * 7
