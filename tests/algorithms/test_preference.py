"""Pairwise losses of the reward model, by hand."""

import math

import pytest
import torch
from torch import Tensor

from proximo.algorithms.preferences import TokenScores, bradley_terry, divergence_window, pair_accuracy


def log_loss(gap: float) -> float:
    return math.log(1 + math.exp(-gap))


def sequence(token_ids: list[int], scores: list[float]) -> TokenScores:
    return TokenScores(
        token_ids=torch.tensor(token_ids), scores=torch.tensor(scores, dtype=torch.float64), lengths=(len(scores),)
    )


def join(*sequences: TokenScores) -> TokenScores:
    return TokenScores(
        token_ids=torch.cat([s.token_ids for s in sequences]),
        scores=torch.cat([s.scores for s in sequences]),
        lengths=tuple(len(s.scores) for s in sequences),
    )


def test_bradley_terry_by_hand():
    chosen, rejected = torch.tensor([2.0, -1.0]), torch.tensor([0.5, 1.0])
    assert bradley_terry(chosen, rejected).tolist() == pytest.approx([log_loss(1.5), log_loss(-2.0)])
    margin = torch.tensor([1.0, 0.5])
    assert bradley_terry(chosen, rejected, margin=margin).tolist() == pytest.approx([log_loss(0.5), log_loss(-2.5)])
    centred = bradley_terry(chosen, rejected, centring=0.1)
    assert centred.tolist() == pytest.approx([log_loss(1.5) + 0.625, log_loss(-2.0)])


def test_bradley_terry_pushes_the_scores_apart_and_centring_pulls_their_sum_to_zero():
    scores = torch.tensor([3.0, 2.5], dtype=torch.float64, requires_grad=True)
    (apart,) = torch.autograd.grad(bradley_terry(scores[:1], scores[1:]), scores)
    assert apart[0] < 0 < apart[1]
    assert apart.sum().item() == pytest.approx(0, abs=1e-15)
    (gradient,) = torch.autograd.grad(bradley_terry(scores[:1], scores[1:], centring=0.01), scores)
    assert (gradient - apart).tolist() == pytest.approx([0.11, 0.11])


@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_bradley_terry_stays_finite(gap):
    chosen = torch.tensor([gap], requires_grad=True)
    loss = bradley_terry(chosen, torch.zeros(1))
    assert loss.isfinite().all()
    assert torch.autograd.grad(loss.sum(), chosen)[0].isfinite().all()


def test_pair_accuracy_counts_a_tie_as_half():
    assert pair_accuracy(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.0, 1.0, 2.0])).tolist() == [1, 0, 0.5]


WINDOWS = {
    "from where the tokens part": (
        ([5, 6, 7, 8], [9.0, 9.0, 1.0, 2.0]),
        ([5, 6, 1, 8], [-9.0, 9.0, 0.5, 3.0]),
        [0.5, -1.0],
    ),
    "tokens that agree again stay in it": (([1, 7, 7], [0.0, 1.0, 2.0]), ([2, 7, 7], [0.5, 0.0, 0.0]), [-0.5, 1, 2]),
    "what has ended stands at its last score": (
        ([3, 4, 5, 6], [0.3, 0.4, 0.5, 0.6]),
        ([3, 4, 7], [0.3, 0.4, 0.7]),
        [-0.2, -0.1],
    ),
    "a beginning of the other parts where it ends": (
        ([3, 4, 4, 4], [9.0, 1.0, 2.0, 4.0]),
        ([3, 4], [9.0, 0.5]),
        [1.5, 3.5],
    ),
    "from index zero": (([1, 2], [1.0, 2.0]), ([3, 2], [0.0, 0.0]), [1.0, 2.0]),
    "identical ones compare their last scores": (([1, 2, 3], [5.0, 6.0, 7.0]), ([1, 2, 3], [9.0, 9.0, 5.0]), [2.0]),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_the_window_of_a_pair(name):
    chosen, rejected, gaps = WINDOWS[name]
    for first, second, sign in ((chosen, rejected, 1), (rejected, chosen, -1)):
        wanted = sum(log_loss(sign * gap) for gap in gaps) / len(gaps)
        assert divergence_window(sequence(*first), sequence(*second)).item() == pytest.approx(wanted)


PAIRS = [
    (([5, 6, 7, 8], [9.0, 9.0, 1.0, 2.0]), ([5, 6, 1], [7.0, 9.0, 0.5])),
    (([1], [3.0]), ([1], [2.5])),
    (([4, 4], [0.1, 0.2]), ([4, 5, 6], [0.0, 0.3, 0.4])),
]


def pairs() -> tuple[TokenScores, TokenScores]:
    chosen, rejected = zip(*PAIRS, strict=True)
    return join(*(sequence(*each) for each in chosen)), join(*(sequence(*each) for each in rejected))


def test_pairs_of_different_lengths_do_not_touch_each_other():
    alone = [divergence_window(sequence(*one), sequence(*other)).item() for one, other in PAIRS]
    assert divergence_window(*pairs()).tolist() == pytest.approx(alone, abs=1e-14)


def with_scores(sequences: TokenScores, scores: Tensor) -> TokenScores:
    return TokenScores(token_ids=sequences.token_ids, scores=scores, lengths=sequences.lengths)


def test_scores_before_the_window_may_be_anything_and_get_no_gradient():
    chosen, rejected = pairs()
    before = torch.tensor([True, True, False, False, False, True, False])
    poisoned = torch.where(before, float("nan"), chosen.scores).requires_grad_()
    losses = divergence_window(with_scores(chosen, poisoned), rejected)
    assert losses.tolist() == divergence_window(chosen, rejected).tolist()
    (gradient,) = torch.autograd.grad(losses.sum(), poisoned)
    assert (gradient[before] == 0).all()
    assert (gradient[~before] < 0).all()


def test_an_empty_sequence_is_refused():
    empty = TokenScores(token_ids=torch.zeros(0, dtype=torch.long), scores=torch.zeros(0), lengths=(0,))
    with pytest.raises(ValueError, match="empty"):
        divergence_window(empty, sequence([1], [1.0]))
