"""The language model as trainers and engine use it: cutting, precision, checkpointing, copies, limits."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from architectures import ARCHITECTURES, build_architecture, random_sequences
from proximo.errors import ModelError
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, pack, pack_responses
from proximo.models.precision.placement import Precision

LENGTHS = [9, 4, 13, 6, 8, 5, 11, 7]
SHAPES = ["llama", "gemma2", "gpt2", "mixtral"]


def responses(indices: list[int] | None = None) -> PackedResponses:
    sequences = random_sequences(LENGTHS)
    chosen = [sequences[index] for index in (indices if indices is not None else range(len(LENGTHS)))]
    return pack_responses([each[:2] for each in chosen], [each[2:] for each in chosen])


def gradients_of(model: LanguageModel, batches: list[PackedResponses]) -> list[Tensor]:
    """Of the mean over all tokens of log-prob squared plus entropy, accumulated over the batches."""
    model.model.zero_grad()
    num_tokens = sum(batch.targets.numel() for batch in batches)
    for batch in batches:
        found = model.response_logprobs(batch, temperature=0.9, entropy=True)
        assert found.entropy is not None
        ((found.logprobs.square() + found.entropy).sum() / num_tokens).backward()
    return [parameter.grad.clone() for _, parameter in model.trainable_parameters()]


def worst_relative_difference(ours: list[Tensor], others: list[Tensor]) -> float:
    return max(((a - b).norm() / b.norm().clamp_min(1e-12)).item() for a, b in zip(ours, others, strict=True))


@pytest.mark.parametrize(
    ("architecture", "dtype"), [*((name, torch.float32) for name in SHAPES), ("gpt2", torch.float64)], ids=str
)
def test_cutting_into_micro_batches_does_not_change_the_gradient(architecture: str, dtype: torch.dtype):
    model, bound = (
        LanguageModel(build_architecture(architecture, dtype=dtype)),
        1e-5 if dtype is torch.float32 else 1e-10,
    )
    whole = gradients_of(model, [responses()])
    for cut in ([[0], [1], [2], [3], [4], [5], [6], [7]], [[6, 1], [0, 3, 2], [7, 5, 4]], [[5, 4, 3, 2, 1, 0, 7, 6]]):
        assert worst_relative_difference(gradients_of(model, [responses(indices) for indices in cut]), whole) < bound


@pytest.mark.parametrize("architecture", SHAPES)
def test_every_trainable_tensor_gets_a_gradient(architecture: str):
    model = LanguageModel(build_architecture(architecture))
    gradients = gradients_of(model, [responses()])
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    assert len(gradients) == len(list(model.model.parameters()))


@pytest.mark.parametrize("architecture", SHAPES)
def test_bf16_is_near_float32_keeps_float32_weights_and_float32_logprobs(architecture: str):
    exact = LanguageModel(build_architecture(architecture))
    half = LanguageModel(copy.deepcopy(exact.model), precision=Precision.BF16)
    with torch.no_grad():
        expected = exact.response_logprobs(responses()).logprobs
        found = half.response_logprobs(responses()).logprobs
    assert found.dtype == torch.float32
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.float32}
    assert 1e-5 < (found - expected).abs().mean() < 0.05
    gradients = gradients_of(half, [responses()])
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    apart = [
        1 - torch.cosine_similarity(a.flatten(), b.flatten(), dim=0)
        for a, b in zip(gradients, gradients_of(exact, [responses()]), strict=True)
    ]
    assert max(apart) < 0.1


def test_a_frozen_copy_stays_when_the_model_moves():
    model = LanguageModel(build_architecture("llama"))
    model.model.train()
    frozen = model.frozen_copy()
    with torch.no_grad():
        before = frozen.hidden_states(responses().packed)
        for _, parameter in model.trainable_parameters():
            parameter.add_(0.1)
        assert frozen.hidden_states(responses().packed).equal(before)
        assert not model.hidden_states(responses().packed).equal(before)
    assert frozen.trainable_parameters() == []
    assert not frozen.model.training


def test_a_sequence_beyond_the_positions_is_an_error():
    model = LanguageModel(build_architecture("gpt2"))
    assert model.position_limit == 128
    with pytest.raises(ModelError, match="a sequence of 129 tokens was given to a gpt2 model that reads at most 128"):
        model.hidden_states(pack([[3], [4] * 129]))


@pytest.mark.parametrize("architecture", ["llama", "opt", "gemma2"])
def test_a_pad_token_id_is_an_ordinary_token_and_trains(architecture: str):
    """Padding may equal EOS: no position is masked, and no embedding row left without gradient, because of an id."""
    plain = build_architecture(architecture)
    options = {**ARCHITECTURES[architecture], "pad_token_id": 5, "eos_token_id": 5}
    padded = AutoModelForCausalLM.from_config(AutoConfig.for_model(**options)).eval()
    padded.load_state_dict(plain.state_dict())
    batch = pack_responses([[3, 5, 5], [5, 5]], [[4, 5], [5, 6]])
    found, gradients = [], []
    for model in (plain, padded):
        language_model = LanguageModel(model)
        found.append(language_model.response_logprobs(batch).logprobs)
        found[-1].sum().backward()
        gradients.append(model.get_input_embeddings().weight.grad[5])
    assert found[0].equal(found[1])
    assert gradients[0].equal(gradients[1])
    assert gradients[0].norm() > 0
