"""Packing: what stands where, by hand."""

from collections.abc import Callable

import pytest
import torch

from architectures import ARCHITECTURES, build_architecture
from proximo.models.language import LanguageModel
from proximo.models.packing import pack, pack_nothing, pack_responses


def test_sequences_lie_end_to_end_and_positions_begin_anew():
    packed = pack([[7, 8, 9], [5], [6, 4]])
    assert packed.token_ids.tolist() == [7, 8, 9, 5, 6, 4]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert packed.lengths == (3, 1, 2)
    assert packed.num_tokens == 6
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.last_indices.tolist() == [2, 3, 5]


def test_predictors_stand_before_their_tokens_and_values_have_one_more():
    batch = pack_responses([[1, 2, 3], [4]], [[5, 6], [7]])
    assert batch.packed.token_ids.tolist() == [1, 2, 3, 5, 6, 4, 7]
    assert batch.targets.tolist() == [5, 6, 7]
    assert batch.predictors.tolist() == [2, 3, 5]
    assert batch.value_positions.tolist() == [2, 3, 4, 5, 6]
    assert batch.response_lengths == (2, 1)
    assert {each.dtype for each in (batch.predictors, batch.targets, batch.value_positions)} == {torch.int64}
    empty = pack_responses([[1, 2], [3]], [[], [4]])
    assert empty.predictors.tolist() == [2]
    assert empty.value_positions.tolist() == [1, 2, 3]
    assert empty.response_lengths == (0, 1)


def test_responses_to_one_prompt_share_all_of_it_but_the_last_token():
    batch = pack_responses([[1, 2, 3], [8, 9], [1, 2, 3], [1, 2, 3]], [[4, 5], [6], [], [7]])
    packed = batch.packed
    assert packed.token_ids.tolist() == [1, 2, 3, 4, 5, 8, 9, 6, 3, 3, 7]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 2, 2, 3]
    assert packed.lengths == (2, 3, 3, 1, 2)
    assert packed.prefixes == (None, 0, None, 0, 0)
    assert packed.last_indices.tolist() == [4, 7, 8, 10]
    assert packed.longest == 5
    assert batch.predictors.tolist() == [2, 3, 6, 9]
    assert batch.targets.tolist() == [4, 5, 6, 7]
    assert batch.value_positions.tolist() == [2, 3, 4, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("prompts", [[[1], [1]], [[1, 2, 4], [1, 3, 4]], [[1, 2], [2]]])
def test_prompts_of_one_token_and_different_ones_share_nothing(prompts: list[list[int]]):
    """Not even what they begin with: the row is as it would be without sharing."""
    packed = pack_responses(prompts, [[5], [6]]).packed
    assert packed.prefixes == ()
    assert packed.token_ids.tolist() == [*prompts[0], 5, *prompts[1], 6]


def test_sequences_share_as_many_tokens_as_they_are_said_to():
    packed = pack([[1, 2, 3], [1, 2, 4], [1, 2], [1, 2, 3]], shareable=[2, 2, 1, 2])
    assert packed.token_ids.tolist() == [1, 2, 3, 4, 1, 2, 3]
    assert packed.prefixes == (None, 0, 0, None, 0)
    assert packed.last_indices.tolist() == [2, 3, 5, 6]


def test_moving_a_batch_moves_all_of_it():
    batch = pack_responses([[1]], [[2]]).to("meta")
    tensors = [
        batch.predictors,
        batch.targets,
        batch.value_positions,
        batch.packed.token_ids,
        batch.packed.position_ids,
    ]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pack([]), "at least one"),
        (lambda: pack([[1], []]), "at least one"),
        # nothing would predict the first token of the response
        (lambda: pack_responses([[]], [[1]]), "every prompt needs"),
        (lambda: pack_responses([[1], [2]], [[3]]), "zip"),
    ],
)
def test_what_cannot_be_packed_is_refused(make: Callable[[], object], words: str):
    with pytest.raises(ValueError, match=words):
        make()


def test_what_is_packed_goes_to_cuda_pinned_and_without_a_wait(monkeypatch: pytest.MonkeyPatch):
    sent: list[tuple[object, ...]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    plain = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda tensor, device, **given: (sent.append((device, given)), plain(tensor, "cpu"))[1]
    )
    pack_responses([[1, 2, 3], [4]], [[5, 6], [7]], device="cuda")
    assert sent == [("cuda", {"non_blocking": True})] * 5
    sent.clear()
    pack([[1, 2]], device="cpu")
    assert all(given == {} for _, given in sent)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_pass_over_nothing_gives_every_weight_a_gradient_of_zero(architecture: str):
    model = LanguageModel(build_architecture(architecture))
    batch = pack_nothing("cpu")
    tokens = model.response_logprobs(batch, entropy=True)
    (tokens.logprobs.sum() + tokens.entropy.sum()).backward()
    assert batch.value_positions.numel() == 0
    # Of mixtures of experts, those that no token is sent to have none.
    given = {name: weight.grad for name, weight in model.model.named_parameters() if "experts" not in name}
    assert all(gradient is not None and not gradient.any() for gradient in given.values())
