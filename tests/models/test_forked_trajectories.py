"""Trajectories of several sequences: one pass over all of them gives what each sequence gives alone."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from architectures import OF_SHARED_PREFIXES, build_architecture
from proximo.algorithms.advantages import gae
from proximo.models.language import LanguageModel
from proximo.models.packing import pack_responses, pack_trajectories, packed_length, plan_batches, shareable_prefixes
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.records import Fork, Response
from records_made import prompt, response

PROMPT = (5, 9, 4)
MASK = [True, True, False, False, True, True, True]


def forked() -> Response:
    """Three calls: the second extends the first, the third begins anew with the first prompt."""
    whole = response([20, 21, 30, 31, 22, 23, 24], to=prompt("a", token_ids=PROMPT), mask=MASK)
    return replace(whole, forks=(Fork(start=5, context=(*PROMPT, 21, 33, 34)),))


def others() -> list[Response]:
    """One with a fork that shares nothing, one of the same group as `forked`, one that ends at a context."""
    stranger = response([40, 41, 42], to=prompt("b", token_ids=(7, 8)))
    cut = response([50, 51], to=prompt("c", token_ids=(3,)))
    return [
        replace(stranger, forks=(Fork(start=1, context=(6, 6, 6)),)),
        response([25, 26], to=prompt("a", token_ids=PROMPT)),
        replace(cut, forks=(Fork(start=2, context=(3, 51, 9)),)),
    ]


def trajectories() -> list[Response]:
    return [forked(), *others()]


def test_a_fork_adds_no_token_and_its_context_is_read():
    batch = pack_trajectories([forked().sequences])
    assert batch.packed.token_ids.tolist() == [5, 9, 4, 20, 21, 30, 31, 22, 4, 21, 33, 34, 23, 24]
    assert batch.packed.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 2, 3, 4, 5, 6, 7]
    assert batch.targets.tolist() == list(forked().token_ids)
    assert batch.response_lengths == (7,)
    assert batch.predictors.tolist() == [2, 3, 4, 5, 6, 11, 12]
    assert batch.value_positions.tolist() == [2, 3, 4, 5, 6, 11, 12, 13]


def test_the_length_of_a_trajectory_is_what_is_computed_for_it():
    for each in trajectories():
        assert packed_length(each.sequences) == pack_trajectories([each.sequences]).packed.num_tokens
    together = [forked(), others()[1]]
    computed = pack_trajectories([each.sequences for each in together]).packed.num_tokens
    lengths, prefixes = (
        [packed_length(each.sequences) for each in together],
        [each.prompt.token_ids for each in together],
    )
    assert plan_batches(lengths, token_budget=computed, prefixes=shareable_prefixes(prefixes)) == [[0, 1]]
    assert len(plan_batches(lengths, token_budget=computed - 1, prefixes=shareable_prefixes(prefixes))) == 2


@pytest.mark.parametrize("architecture", OF_SHARED_PREFIXES)
def test_forked_trajectories_equal_their_sequences_one_by_one(architecture: str):
    """Log-probs, values (with one after the last sequence), and the gradient of both."""
    model = LanguageModel(build_architecture(architecture))
    critic = scalar_from_language_model(model, HeadStart.NORMAL)
    parts = [part for each in trajectories() for part in each.sequences]
    runs = {}
    for name in ("whole", "one by one"):
        policy, value = LanguageModel(copy.deepcopy(model.model)), copy.deepcopy(critic)
        if name == "whole":
            batch = pack_trajectories([each.sequences for each in trajectories()])
            logprobs, values = policy.response_logprobs(batch).logprobs, value.response_values(batch)
        else:
            singles = [pack_responses([context], [tokens]) for context, tokens in parts]
            logprobs = torch.cat([policy.response_logprobs(one).logprobs for one in singles])
            values = torch.cat(_only_last_ends([value.response_values(one) for one in singles]))
        weights = torch.randn(len(logprobs) + len(values), generator=torch.Generator().manual_seed(1))
        (torch.cat([logprobs, values]) * weights).sum().backward()
        gradients = torch.cat([p.grad.flatten() for m in (policy, value) for p in m.model.parameters()])
        runs[name] = logprobs.detach(), values.detach(), gradients
    for got, expected in zip(*runs.values(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)


def _only_last_ends(values: list[Tensor]) -> list[Tensor]:
    """The value after the last token belongs to the last sequence of each trajectory alone."""
    counts = [len(each.sequences) for each in trajectories()]
    ends = {sum(counts[: i + 1]) - 1 for i in range(len(counts))}
    return [value if index in ends else value[:-1] for index, value in enumerate(values)]


def test_advantages_go_over_the_fork():
    """A turn in a further sequence hands its advantage back to the turns before it."""
    whole = forked()
    rewards, values = torch.zeros(7), torch.zeros(8)
    rewards[6] = 1.0
    values[5] = 0.5  # of the state at the end of the fork's context
    options = {"bootstrap": torch.tensor([False]), "gamma": 1.0, "lam": 1.0}
    advantages, returns = gae(rewards, values, whole.response_mask, [7], **options)
    assert advantages.tolist() == [1.0, 1.0, 0.0, 0.0, 1.0, 0.5, 1.0]
    assert returns[whole.response_mask].tolist() == [1.0] * 5
