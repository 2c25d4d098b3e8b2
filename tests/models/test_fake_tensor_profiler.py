"""A profiled pass counts what a real one keeps and computes."""

import copy

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from builders import tiny_language_model
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.packing import pack_responses
from proximo.models.transformers_model import disable_dropout, freeze_layers
from proximo.plan.fake_tensor_profiler import ACTIVATIONS, GRADIENTS, PassProfiler, shapes_only, to_fake_tensors

LENGTHS = ((5, 40), (3, 30), (1, 20))
TYPES = {
    "llama": {},
    "gpt2": {"num_key_value_heads": None},
    "qwen2": {"num_key_value_heads": 1},
    "opt": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def of_type(model_type: str) -> LanguageModel:
    options = {"intermediate_size": 48, **TYPES[model_type]}
    if model_type in ("gpt2", "opt"):
        options = {} if model_type == "opt" else {"n_inner": 48}
    model = LanguageModel(tiny_language_model(model_type, **options))
    disable_dropout(model.model)
    return model


def batch():
    return pack_responses([[7] * prompt for prompt, _ in LENGTHS], [[9] * response for _, response in LENGTHS])


def kept_bytes(model: LanguageModel) -> int:
    """What autograd holds between the forward and the backward pass, weights aside: each storage once."""
    weights = {p.untyped_storage().data_ptr() for p in model.model.parameters()}
    kept = {}

    def pack_hook(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    model.model.train()
    given = batch()
    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
        model.response_logprobs(given)
    return sum(size for size, _ in kept.values())


def profiled_cost(model: LanguageModel, *, rounds: int = 1):
    """Cost of gradients, without a number in any weight."""
    with shapes_only():
        to_fake_tensors(model.model)
        model.model.train()
        with PassProfiler([model.model]) as profiler:
            for _ in range(rounds):
                model.response_logprobs(batch()).logprobs.sum().backward()
        return profiler.cost()


def held_for_backward(model: LanguageModel) -> int:
    """Bytes of activations that a profiled forward pass leaves alive."""
    with shapes_only():
        to_fake_tensors(model.model)
        model.model.train()
        with PassProfiler([model.model]) as profiler:
            result = model.response_logprobs(batch())
            held = sum(profiler._held[part] for part in ACTIVATIONS)
        del result
    return held


@pytest.mark.parametrize("model_type", list(TYPES))
def test_activations_are_what_autograd_keeps(model_type):
    kept = kept_bytes(of_type(model_type))
    assert held_for_backward(of_type(model_type)) == pytest.approx(kept, rel=0.15)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_checkpointed_and_frozen_layers_keep_less_as_they_really_do(model_type):
    whole = sum(profiled_cost(of_type(model_type)).parts.values())
    checkpointed, frozen = of_type(model_type), of_type(model_type)
    checkpointed.use_activation_checkpointing()
    freeze_layers(frozen.base, 1)
    kept = kept_bytes(frozen)
    assert held_for_backward(copy.deepcopy(frozen)) == pytest.approx(kept, rel=0.2)
    # Below a tied embedding, which trains, a fused layer needs all that it keeps for the gradient of its input.
    assert profiled_cost(frozen).peak <= whole
    assert profiled_cost(checkpointed).peak < 0.8 * whole


def test_operations_of_a_llama_are_those_of_the_formulas():
    """6 per weight and token of training; a head that is computed twice; attention over the full square."""
    model = of_type("llama")
    width, vocabulary = model.head.weight.shape[1], model.head.weight.shape[0]
    layers = sum(p.numel() for name, p in model.base.named_parameters() if p.ndim == 2 and ".layers." in name)
    tokens, targets = sum(map(sum, LENGTHS)), sum(response for _, response in LENGTHS)
    attention = 2 * sum(4 * (prompt + response) ** 2 * width for prompt, response in LENGTHS)
    behind_attention = sum(
        p.numel()
        for name, p in model.base.named_parameters()
        if ".layers.1.mlp" in name or ".layers.1.self_attn.o" in name
    )
    products = layers * tokens - behind_attention * (tokens - targets)  # the last layer gives what is asked for
    expected = 6 * products + 8 * targets * width * vocabulary + 3.5 * attention
    assert profiled_cost(model).flops == expected


@pytest.mark.parametrize("model_type", list(TYPES))
def test_operations_are_those_that_torch_counts_in_a_real_pass(model_type):
    model = of_type(model_type)
    model.model.train()
    # torch does not count the product that adds gradients up, nor those of the tokens of each expert.
    adding = {
        torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1],
        torch.ops.aten._grouped_mm: lambda a, b, *_, **__: 2 * a[0] * a[1] * b[-1],
    }
    with FlopCounterMode(display=False, custom_mapping=adding) as counter, sdpa_kernel(SDPBackend.MATH):
        model.response_logprobs(batch()).logprobs.sum().backward()
    # The attention that torch can count keeps its scores, which the fused one computes twice: 2 layers, 2 operations
    # for each pair and width.
    uncounted = 4 * sum((prompt + response) ** 2 for prompt, response in LENGTHS) * model.head.weight.shape[1]
    # torch's counter has hooks, with which layers run as modules: the last one also for the 9 of 99 tokens of prompts.
    assert profiled_cost(of_type(model_type)).flops == pytest.approx(counter.get_total_flops() + uncounted, rel=0.05)


def test_a_second_micro_batch_begins_with_all_gradients_held():
    model = of_type("llama")
    trained = sum(parameter.numel() for parameter in model.model.parameters())
    once, twice = profiled_cost(of_type("llama")), profiled_cost(model, rounds=2)
    assert twice.parts[GRADIENTS] == 4 * trained > once.parts.get(GRADIENTS, 0)
    assert twice.peak > once.peak
    assert twice.flops == 2 * once.flops


def test_an_adapter_trains_with_less_work_and_few_gradients():
    adapted = of_type("llama").with_adapter(LoRAOptions(rank=2, alpha=4.0))
    trained = sum(p.numel() for p in adapted.model.parameters() if p.requires_grad)
    cost = profiled_cost(adapted, rounds=2)
    assert cost.parts[GRADIENTS] == 4 * trained
    assert cost.flops < 0.9 * profiled_cost(of_type("llama"), rounds=2).flops
