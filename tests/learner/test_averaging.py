"""A follower is the average that the formula says, and a follower without memory is a copy."""

import pytest
import torch
from torch import nn

from builders import tiny_language_model
from proximo.ppo.roles.worker import follow


def test_an_average_is_the_weighted_sum_of_all_that_the_leader_was() -> None:
    follower, leader = nn.Linear(1, 1, bias=False).double(), nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(follower.weight, 8.0)
    for value in (4.0, 16.0):
        nn.init.constant_(leader.weight, value)
        follow(follower, leader, decay=0.75)
    assert follower.weight.item() == pytest.approx(0.75 * (0.75 * 8 + 0.25 * 4) + 0.25 * 16)


def test_without_decay_it_is_a_copy_to_the_bit_tied_weights_included() -> None:
    follower, leader = (tiny_language_model(seed=seed, tie_word_embeddings=True) for seed in (0, 1))
    follow(follower, leader, decay=0.0)
    for mine, its in zip(follower.parameters(), leader.parameters(), strict=True):
        assert torch.equal(mine, its)
    assert follower.get_output_embeddings().weight is follower.get_input_embeddings().weight


def test_buffers_are_those_of_the_leader() -> None:
    follower, leader = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    leader(torch.tensor([[1.0, 2.0], [3.0, 9.0]]))
    follow(follower, leader, decay=0.9)
    assert torch.equal(follower.running_mean, leader.running_mean)
