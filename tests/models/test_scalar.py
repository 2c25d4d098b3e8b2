"""Value and reward models: scores, heads, and what transformers makes of a saved one."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from architectures import ARCHITECTURES, build_architecture, random_sequences
from proximo.errors import ModelError
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.packing import pack, pack_responses
from proximo.models.precision.placement import Precision
from proximo.models.pretrained.saving import load_weights, save_pretrained
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model, start_head

LENGTHS = [9, 3, 14, 6]
WITH_CLASSIFIER = [name for name in ARCHITECTURES if name not in ("granite", "cohere")]


def scalar(architecture: str = "llama", start: HeadStart = HeadStart.NORMAL, seed: int = 1) -> ScalarModel:
    return scalar_from_language_model(LanguageModel(build_architecture(architecture)), start, seed=seed)


@pytest.mark.parametrize("architecture", WITH_CLASSIFIER)
def test_transformers_reads_the_same_score_from_the_saved_model(architecture: str, tmp_path: Path):
    model = scalar(architecture)
    save_pretrained(model.model, tmp_path)
    own = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager")
    assert own.config.num_labels == 1
    sequences = random_sequences(LENGTHS)
    with torch.no_grad():
        expected = [own(input_ids=torch.tensor([sequence])).logits[0, 0] for sequence in sequences]
        found = model.sequence_scores(pack(sequences))
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=2e-5)


@pytest.mark.parametrize("architecture", WITH_CLASSIFIER)
def test_every_tensor_trains_and_the_language_model_is_left_alone(architecture: str):
    origin = LanguageModel(build_architecture(architecture))
    before = copy.deepcopy(origin.model.state_dict())
    model = scalar_from_language_model(origin, HeadStart.NORMAL)
    model.token_scores(pack(random_sequences(LENGTHS))).square().sum().backward()
    parameters = dict(model.trainable_parameters())
    assert len(parameters) == len(list(model.model.parameters()))
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
        with torch.no_grad():
            parameter.add_(1.0)
    assert all(tensor.equal(before[name]) for name, tensor in origin.model.state_dict().items())


def test_a_score_depends_on_its_past_alone():
    model = scalar()
    sequence = random_sequences([9])[0]
    with torch.no_grad():
        whole = model.token_scores(pack([sequence, sequence[:5]]))
    torch.testing.assert_close(whole[:5], whole[9:], rtol=0, atol=2e-6)


def test_response_values_stand_before_every_token_and_after_the_last():
    model = scalar()
    prompts, answers = [[3, 4, 5], [6]], [[7, 8], []]
    batch = pack_responses(prompts, answers)
    with torch.no_grad():
        tokens = model.token_scores(batch.packed)
        values = model.response_values(batch)
    torch.testing.assert_close(values, tokens[[2, 3, 4, 5]], rtol=0, atol=2e-6)


def test_a_value_head_begins_at_zero_and_a_reward_head_at_its_seed_and_not_at_the_global_one():
    packed = pack(random_sequences(LENGTHS))
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    first, again, other = (scalar(seed=seed) for seed in (1, 1, 2))
    assert torch.rand(3).equal(expected)
    with torch.no_grad():
        assert not scalar(start=HeadStart.ZERO).token_scores(packed).any()
        assert first.token_scores(packed).equal(again.token_scores(packed))
        assert not first.token_scores(packed).equal(other.token_scores(packed))


def test_a_reward_head_has_the_spread_of_its_definition():
    """N(0, 1 / (D + 1)) over a head of many numbers."""
    layer = torch.nn.Linear(4096, 1, bias=False)
    start_head(layer, HeadStart.NORMAL, seed=0)
    assert layer.weight.std().item() == pytest.approx(4097**-0.5, rel=0.05)


def test_an_adapted_policy_gives_its_merged_function_to_the_value_model():
    policy = LanguageModel(build_architecture("llama")).with_adapter(LoRAOptions(rank=2))
    with torch.no_grad():
        for name, parameter in policy.trainable_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
    value = scalar_from_language_model(policy, HeadStart.NORMAL)
    packed = pack(random_sequences(LENGTHS))
    with torch.no_grad():
        torch.testing.assert_close(value.backbone.packed(packed), policy.hidden_states(packed), rtol=0, atol=2e-5)
    assert not any("lora" in name for name, _ in value.trainable_parameters())


def test_under_lora_the_backbone_is_frozen_and_the_head_trains_and_both_survive_saving(tmp_path: Path):
    model = scalar().with_adapter(LoRAOptions(rank=2))
    names = [name for name, _ in model.trainable_parameters()]
    assert all("lora_" in name or "score" in name for name in names)
    assert any("score" in name for name in names)
    packed = pack(random_sequences(LENGTHS))
    with torch.no_grad():
        for _, parameter in model.trainable_parameters():
            parameter.add_(0.05)
        expected = model.token_scores(packed)
    save_pretrained(model.model, tmp_path)
    other = scalar(seed=1).with_adapter(LoRAOptions(rank=2, seed=8))
    load_weights(other.model, tmp_path)
    with torch.no_grad():
        assert other.token_scores(packed).equal(expected)


def test_bf16_keeps_the_head_in_float32():
    exact = scalar()
    half = ScalarModel(copy.deepcopy(exact.model), precision=Precision.BF16)
    packed = pack(random_sequences(LENGTHS))
    with torch.no_grad():
        found, expected = half.token_scores(packed), exact.token_scores(packed)
        hidden = half.backbone.packed(packed).float()
        by_hand = hidden @ half.model.score.weight[0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, by_hand, rtol=0, atol=1e-6)
    assert 0 < (found - expected).abs().mean() < 0.05


def test_padding_that_equals_eos_is_dropped_so_that_transformers_reads_the_last_token(tmp_path: Path):
    origin = build_architecture("llama")
    origin.config.pad_token_id = origin.config.eos_token_id = 2
    model = scalar_from_language_model(LanguageModel(origin), HeadStart.NORMAL)
    save_pretrained(model.model, tmp_path)
    own = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    sequence = [5, 6, 2]
    with torch.no_grad():
        expected = own(input_ids=torch.tensor([sequence])).logits[0]
        torch.testing.assert_close(model.sequence_scores(pack([sequence])), expected, rtol=0, atol=2e-5)
    assert origin.config.pad_token_id == 2


def test_what_carries_no_scalar_head_is_refused():
    for architecture in ("granite", "cohere"):
        with pytest.raises(ModelError, match=f"a {architecture} model cannot carry a scalar head"):
            scalar(architecture)
    config = copy.deepcopy(build_architecture("llama").config)
    config.num_labels = 3
    with pytest.raises(ModelError, match="has 3 labels"):
        ScalarModel(AutoModelForSequenceClassification.from_config(config))
    with pytest.raises(ModelError, match="LlamaForCausalLM has no linear layer named score"):
        ScalarModel(build_architecture("llama"))
