"""Adapters: what trains, merging, and what is refused. Not what other roles run on the same base: test_sharing.py."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from architectures import ARCHITECTURES, LLAMA_LIKE, build_architecture, random_sequences
from proximo.errors import ModelError
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions, add_adapter, load_adapter, merged_copy
from proximo.models.packing import pack, pack_responses
from proximo.models.pretrained.saving import save_pretrained

PACKED = pack(random_sequences([9, 3, 14, 6]))


def adapted(architecture: str = "llama", **options) -> LanguageModel:
    """With B away from 0, so that the adapter does something."""
    model = LanguageModel(build_architecture(architecture)).with_adapter(LoRAOptions(rank=2, **options))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.trainable_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_adapter_tensor_gets_a_gradient_and_nothing_else_does(architecture: str):
    model = adapted(architecture)
    sequences = random_sequences([9, 14])
    batch = pack_responses([each[:2] for each in sequences], [each[2:] for each in sequences])
    model.response_logprobs(batch).logprobs.sum().backward()
    for name, parameter in model.model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name), name
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name
        else:
            assert parameter.grad is None, name


def test_a_new_adapter_is_the_base_and_its_seed_is_its_own():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = LanguageModel(build_architecture("llama")).with_adapter(LoRAOptions(rank=2, seed=1))
    assert torch.rand(2).equal(expected)
    with torch.no_grad():
        expected = LanguageModel(build_architecture("llama")).hidden_states(PACKED)
        # The one runs as modules and the other fused.
        assert (first.hidden_states(PACKED) - expected).abs().max() <= 4e-6 * expected.abs().max()
    second, other = (
        LanguageModel(build_architecture("llama")).with_adapter(LoRAOptions(rank=2, seed=s)) for s in (1, 2)
    )
    weights = [dict(each.trainable_parameters()) for each in (first, second, other)]
    name = next(name for name in weights[0] if "lora_A" in name)
    assert weights[0][name].equal(weights[1][name])
    assert not weights[0][name].equal(weights[2][name])


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral", "gemma2"])
@torch.no_grad()
def test_the_merged_copy_is_the_same_function_and_the_training_model_keeps_its_bits(architecture: str):
    model = adapted(architecture)
    before = copy.deepcopy(model.model.state_dict())
    expected = model.hidden_states(PACKED)
    merged = LanguageModel(merged_copy(model.model))
    assert not any("lora" in name for name, _ in merged.model.named_parameters())
    torch.testing.assert_close(merged.hidden_states(PACKED), expected, rtol=0, atol=5e-5)
    assert all(tensor.equal(before[name]) for name, tensor in model.model.state_dict().items())
    assert model.hidden_states(PACKED).equal(expected)


def test_a_saved_adapter_loads_in_transformers_and_here(tmp_path: Path):
    base = build_architecture("llama")
    base.save_pretrained(tmp_path / "base")
    source = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = LanguageModel(source).with_adapter(LoRAOptions(rank=2))
    with torch.no_grad():
        for _, parameter in model.trainable_parameters():
            parameter.add_(0.05)
        expected = model.hidden_states(PACKED)
    save_pretrained(model.model, tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = LanguageModel(load_adapter(plain, tmp_path / "adapter"))
    sequence = random_sequences([9])[0]
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter", attn_implementation="eager")
    with torch.no_grad():
        assert again.hidden_states(PACKED).equal(expected)
        logits = own(input_ids=torch.tensor([sequence])).logits[0]
        torch.testing.assert_close(again.head.logits(again.hidden_states(pack([sequence]))), logits, rtol=0, atol=2e-5)
    assert [name for name, _ in again.trainable_parameters()] == [name for name, _ in model.trainable_parameters()]


def with_adapters(model: PreTrainedModel, **options: Any) -> set[str]:
    """The names of the layers that get one."""
    made = add_adapter(model, LoRAOptions(rank=2, **options))
    return {name.split(".lora_")[0].rpartition(".")[2] for name, p in made.named_parameters() if p.requires_grad}


def test_only_the_named_layers_get_an_adapter_and_in_a_mixture_of_experts_only_attention():
    """peft would take the shared expert's layers for those of the stacked ones, which are no linear layers."""
    named = ("q_proj", "down_proj")
    assert with_adapters(build_architecture("llama"), target_modules=named) == set(named)
    config = AutoConfig.for_model("qwen2_moe", **LLAMA_LIKE, num_experts=4, moe_intermediate_size=24)
    assert with_adapters(AutoModelForCausalLM.from_config(config)) == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("architecture", "target", "message"),
    [
        ("llama", "lm_head", "the output layer or the embedding"),
        ("qwen2", "lm_head", "the output layer or the embedding"),
        ("llama", "embed_tokens", "the output layer or the embedding"),
        ("llama", "query", "is not a linear layer of this llama model; its layers are .*q_proj"),
    ],
)
def test_a_target_that_cannot_be_adapted_is_refused(architecture: str, target: str, message: str):
    with pytest.raises(ModelError, match=message):
        add_adapter(build_architecture(architecture), LoRAOptions(target_modules=(target,)))
    with pytest.raises(ModelError, match=r"no adapter_config\.json"):
        load_adapter(build_architecture(architecture), Path("nowhere"))
