"""Switching dropout off: after it, two passes in train mode give the same bits."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from architectures import ARCHITECTURES, random_sequences
from builders import tiny_language_model
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.packing import pack
from proximo.models.transformers_model import disable_dropout

PROBABILITIES = {
    "attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout", "dropout", "layerdrop",
    "activation_dropout", "router_jitter_noise",
}  # fmt: skip


def with_dropout(architecture: str) -> LanguageModel:
    """Everything that an architecture can drop, at 0.3, in train mode; layers are never dropped whole here."""
    config = AutoConfig.for_model(**ARCHITECTURES[architecture])
    for name in PROBABILITIES & set(config.to_dict()):
        setattr(config, name, 0.0 if name == "layerdrop" else 0.3)
    model = AutoModelForCausalLM.from_config(config)
    return LanguageModel(model.train())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_two_passes_in_train_mode_agree_after_it_and_not_before(architecture: str):
    model = with_dropout(architecture)
    packed = pack(random_sequences([9, 6]))
    assert not model.hidden_states(packed).equal(model.hidden_states(packed))
    assert disable_dropout(model.model) > 0
    assert model.hidden_states(packed).equal(model.hidden_states(packed))
    eval_mode = model.hidden_states(packed)
    model.model.eval()
    assert model.hidden_states(packed).equal(eval_mode)
    assert disable_dropout(model.model) == 0
    said = model.model.config.to_dict()
    assert not [name for name in PROBABILITIES & set(said) if said[name]]


@torch.no_grad()
def test_the_dropout_of_an_adapter_goes_too():
    model = with_dropout("llama")
    disable_dropout(model.model)
    adapted = model.with_adapter(LoRAOptions(rank=2))
    for module in adapted.model.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = torch.nn.Dropout(0.5)  # as an adapter that was trained elsewhere may have
    for name, parameter in adapted.trainable_parameters():
        if "lora_B" in name:
            parameter.fill_(0.3)
    adapted.model.train()
    packed = pack(random_sequences([9, 6]))
    assert not adapted.hidden_states(packed).equal(adapted.hidden_states(packed))
    assert disable_dropout(adapted.model) == 14
    assert adapted.hidden_states(packed).equal(adapted.hidden_states(packed))


def test_experts_that_are_drawn_in_training_are_chosen_as_in_evaluation():
    """PhiMoE, whose `router_jitter_noise` says in evaluation too which experts take part."""
    plain = tiny_language_model("phimoe", num_local_experts=4, router_jitter_noise=0.3, input_jitter_noise=0.1)
    model, packed = LanguageModel(plain), pack(random_sequences([9, 6]))
    evaluated = model.hidden_states(packed)
    plain.train()
    assert not model.hidden_states(packed).equal(model.hidden_states(packed))
    assert disable_dropout(plain) > 0
    for trained in (model, copied := LanguageModel(copy.deepcopy(plain))):
        trained.model.train()
        assert trained.hidden_states(packed).equal(evaluated)
    assert (plain.config.router_jitter_noise, plain.config.input_jitter_noise) == (0.3, 0.0)
    copied.hidden_states(packed).sum().backward()
    routers = [weight for name, weight in copied.trainable_parameters() if "router" in name]
    assert all(router.grad.any() for router in routers)
    assert len(routers) == 2
