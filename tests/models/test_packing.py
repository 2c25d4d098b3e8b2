"""Packing: what stands where, by hand."""

import pytest
import torch

from proximo.models.packing import pack, pack_responses


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
    following = batch.packed.token_ids[batch.predictors + 1]
    assert following.equal(batch.targets)


def test_an_empty_response_leaves_its_last_value_alone():
    batch = pack_responses([[1, 2], [3]], [[], [4]])
    assert batch.predictors.tolist() == [2]
    assert batch.value_positions.tolist() == [1, 2, 3]
    assert batch.response_lengths == (0, 1)


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


@pytest.mark.parametrize("sequences", [[], [[1], []]])
def test_nothing_to_pack_is_refused(sequences: list[list[int]]):
    with pytest.raises(ValueError, match="at least one"):
        pack(sequences)


def test_a_prompt_without_tokens_is_refused_since_nothing_would_predict_the_first_response_token():
    with pytest.raises(ValueError, match="every prompt needs"):
        pack_responses([[]], [[1]])


def test_unequal_numbers_of_prompts_and_responses_are_refused():
    with pytest.raises(ValueError, match="zip"):
        pack_responses([[1], [2]], [[3]])
