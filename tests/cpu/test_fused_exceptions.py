"""Fused layers beside models that are not quite as transformers makes them: changed by someone, cut short, odd."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from architectures import build_architecture
from proximo.models.attention.cache import PromptCache
from proximo.models.attention.packed import PackedLayout
from proximo.models.language import LanguageModel
from proximo.models.packing import Packed, pack
from proximo_cpu.fused_layers import FusedLayers


def sequences() -> Packed:
    """16 tokens, longer than the window of a model with one."""
    return pack([[(5 * i + n) % 50 + 3 for i in range(n)] for n in (9, 7)])


def as_modules(model: LanguageModel, packed: Packed, cache: PromptCache | None = None) -> Tensor:
    """Hidden states by the model's own code."""
    layout = PackedLayout(packed.lengths, model.backbone.path.attention)
    return model.backbone.run(packed.token_ids[None], packed.position_ids[None], layout=layout, cache=cache)[0]


class OnePlus(nn.Module):
    """Gemma's norm: another formula under the same names."""

    def __init__(self, before: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = before.weight, before.variance_epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        scale = (hidden.square().mean(dim=-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return hidden * scale * (1 + self.weight)


def doubled(module: Any) -> None:
    """A method of one's own, as accelerate and kernels put it into one module."""
    own = type(module).forward
    module.forward = MethodType(lambda self, *given: 2 * own(self, *given), module)


def put_other_last_norm(layers: Any) -> None:
    layers.norm = OnePlus(layers.norm)


def put_layer_norm_last(layers: Any) -> None:
    layers.norm = nn.LayerNorm(layers.norm.weight.shape[0])


def put_other_norm(layers: Any) -> None:
    layers.layers[1].input_layernorm = OnePlus(layers.layers[1].input_layernorm)


def put_own_forward_of_linear(layers: Any) -> None:
    doubled(layers.layers[0].mlp.up_proj)


def put_own_forward_of_part(layers: Any) -> None:
    doubled(layers.layers[0].mlp)


def put_own_forward_of_model(layers: Any) -> None:
    own = layers.forward

    def forward(**given: Any) -> Any:
        output = own(**given)
        output.last_hidden_state = output.last_hidden_state * 2
        return output

    layers.forward = forward


def put_own_class(layers: Any) -> None:
    gated = layers.layers[0].mlp
    gated.__class__ = type("Own", (type(gated),), {"forward": lambda self, x: 2 * self.down_proj(self.up_proj(x))})


def put_module_without_a_mode(layers: Any) -> None:
    """As torch.compile and torch.jit wrap a module: `training` is looked up elsewhere."""
    gated = layers.layers[0].mlp
    own = {"forward": lambda self, x: 2 * self.down_proj(self.up_proj(x)), "training": False}
    gated.__class__ = type("Wrapped", (type(gated),), own)
    del gated.__dict__["training"]


CHANGES = (
    put_module_without_a_mode,
    put_other_last_norm,
    put_layer_norm_last,
    put_other_norm,
    put_own_forward_of_linear,
    put_own_forward_of_part,
    put_own_forward_of_model,
    put_own_class,
)


@pytest.mark.parametrize("change", CHANGES)
def test_code_that_someone_has_put_into_a_model_runs(change: Callable[[Any], None]) -> None:
    model, packed = LanguageModel(build_architecture("llama")), sequences()
    before = model.hidden_states(packed)
    change(model.backbone.layers)
    after = model.hidden_states(packed)
    assert (after - as_modules(model, packed)).abs().max() <= 4e-6 * after.abs().max()
    assert (after - before).abs().max() > 0.01


@pytest.mark.parametrize("part", ["embed_tokens", "norm"])
def test_a_part_in_half_precision_is_cast_as_the_modules_cast_it(part: str) -> None:
    model, packed = LanguageModel(build_architecture("llama")), sequences()
    model.hidden_states(packed)
    model.backbone.layers.get_submodule(part).to(torch.bfloat16)
    hidden = model.hidden_states(packed)
    assert torch.equal(hidden, as_modules(model, packed))
    hidden.sum().backward()
    assert all(weight.grad is not None for weight in model.backbone.layers.parameters())


def test_dropout_follows_the_mode_of_the_attention_and_not_of_its_layer() -> None:
    layers: Any = LanguageModel(build_architecture("llama")).backbone.layers
    for layer in layers.layers:
        layer.self_attn.attention_dropout = 0.1
    assert FusedLayers.of(layers) is not None
    layers.layers[0].self_attn.train()
    assert FusedLayers.of(layers) is None


def test_a_window_that_only_the_configuration_of_a_llama_names_is_no_window() -> None:
    model, packed = LanguageModel(build_architecture("llama")), sequences()
    model.base.config.sliding_window = 3
    assert FusedLayers.of(model.backbone.layers) is not None
    expected = as_modules(model, packed)
    assert (model.hidden_states(packed) - expected).abs().max() <= 4e-6 * expected.abs().max()


def test_layers_beyond_the_configured_number_are_not_run() -> None:
    model, packed = LanguageModel(build_architecture("llama")), sequences()
    model.base.config.num_hidden_layers = 1
    expected = as_modules(model, packed)
    ours = model.hidden_states(packed, packed.last_indices)
    assert (ours - expected[packed.last_indices]).abs().max() <= 4e-6 * expected.abs().max()


def test_prompts_are_cached_under_the_names_and_in_the_space_of_the_modules() -> None:
    """A layer that lost those below it keeps its name; no queries are kept along with keys and values."""
    model, packed = LanguageModel(build_architecture("llama")), sequences()
    layers: Any = model.backbone.layers
    del layers.layers[0]
    model.base.config.num_hidden_layers = len(layers.layers)
    own, ours = PromptCache(packed.lengths), PromptCache(packed.lengths)
    with torch.inference_mode():
        as_modules(model, packed, own)
        model.prefill(packed, ours)
    assert ours.captured.keys() == own.captured.keys()
    for index, expected in own.captured.items():
        for tensor, by_module in zip(ours.captured[index], expected, strict=True):
            assert (tensor - by_module).abs().max() <= 4e-6 * by_module.abs().max()
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
