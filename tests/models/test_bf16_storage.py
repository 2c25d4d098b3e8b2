"""Frozen models in bf16: half the memory, the same bits, and nothing of what trains."""

import pytest
import torch

from architectures import build_architecture, random_sequences
from builders import tiny_language_model
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.packing import PackedResponses, pack_responses
from proximo.models.precision.placement import Precision
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.models.sharing import base_alone
from proximo.models.transformers_model import freeze_layers


def policy(name: str = "llama", precision: Precision = Precision.BF16) -> LanguageModel:
    return LanguageModel(build_architecture(name), precision=precision)


def batch() -> PackedResponses:
    sequences = random_sequences([7, 5, 9])
    return pack_responses([each[:2] for each in sequences], [each[2:] for each in sequences])


def types(model: LanguageModel) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in model.model.named_parameters()}


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.BF16_FLOAT32_HEAD])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gemma2", "mixtral"])
@torch.no_grad()
def test_a_narrowed_reference_gives_the_same_bits(name: str, precision: Precision) -> None:
    model = policy(name, precision)
    reference = model.frozen_copy()
    before = sum(each.numel() * each.element_size() for each in reference.model.parameters())
    reference.narrow_frozen(beside=[model.model])
    assert sum(each.numel() * each.element_size() for each in reference.model.parameters()) < before
    expected, found = (each.response_logprobs(batch(), temperature=0.9).logprobs for each in (model, reference))
    assert found.equal(expected)
    assert set(types(model).values()) == {torch.float32}


def test_what_only_products_read_becomes_bf16_and_nothing_else_does() -> None:
    wide = {}
    for precision in (Precision.BF16, Precision.BF16_FLOAT32_HEAD, Precision.FLOAT32):
        reference = policy(precision=precision).frozen_copy()
        reference.narrow_frozen()
        wide[precision] = {name for name, kind in types(reference).items() if kind is torch.float32}
    assert {name for name in wide[Precision.BF16] if "norm" not in name} == {"model.embed_tokens.weight"}
    assert sum("norm" in name for name in wide[Precision.BF16]) == 5
    assert wide[Precision.BF16_FLOAT32_HEAD] == wide[Precision.BF16] | {"lm_head.weight"}
    assert wide[Precision.FLOAT32] == set(types(reference))


@torch.no_grad()
def test_an_embedding_of_bf16_numbers_is_stored_as_such_and_a_tied_head_with_it() -> None:
    plain = tiny_language_model(tie_word_embeddings=True)
    for parameter in plain.parameters():
        parameter.copy_(parameter.bfloat16())  # as a checkpoint in bf16 is loaded
    model = LanguageModel(plain, precision=Precision.BF16)
    reference = model.frozen_copy()
    reference.narrow_frozen()
    assert types(reference)["model.embed_tokens.weight"] is torch.bfloat16
    hidden = reference.hidden_states(batch().packed)
    assert hidden.equal(model.hidden_states(batch().packed))
    assert hidden.dtype is torch.float32
    assert reference.response_logprobs(batch()).logprobs.equal(model.response_logprobs(batch()).logprobs)


def test_what_trains_and_what_it_shares_stays_as_it_is() -> None:
    model = policy()
    freeze_layers(model.base, 1)
    model.narrow_frozen()  # as one would by mistake
    names = [name for name, parameter in model.model.named_parameters() if parameter.requires_grad]
    assert {types(model)[name] for name in names} == {torch.float32}

    shared = policy()
    freeze_layers(shared.base, 1)
    shared.frozen_copy().narrow_frozen(beside=[shared.model])
    assert set(types(shared).values()) == {torch.float32}

    adapted = policy().with_adapter(LoRAOptions(rank=2, seed=1))
    base_alone(adapted).narrow_frozen(beside=[adapted.model])
    assert set(types(adapted).values()) == {torch.float32}


@torch.no_grad()
def test_a_reward_model_keeps_its_head_in_float32_and_its_scores() -> None:
    reward = scalar_from_language_model(policy(), HeadStart.NORMAL, seed=1)
    expected = reward.sequence_scores(batch().packed)
    reward.model.requires_grad_(False)
    reward.narrow_frozen()
    assert reward.sequence_scores(batch().packed).equal(expected)
    assert reward.trained_head()[0].dtype is torch.float32
    assert torch.bfloat16 in {parameter.dtype for parameter in reward.model.parameters()}
