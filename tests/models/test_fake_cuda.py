"""What passes do on CUDA, followed by shapes and types: which kernel they take, on which device, in which type."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import fake_cuda as fake_cuda_module
from architectures import build_architecture
from builders import tiny_language_model
from fake_cuda import CUDA, fake_cuda
from proximo.models import probe
from proximo.models.attention import varlen
from proximo.models.attention.cache import PromptCache, RowCache
from proximo.models.language import LanguageModel
from proximo.models.packing import pack, pack_responses
from proximo.models.precision.compute import casting
from proximo.models.precision.placement import Precision

pytestmark = pytest.mark.filterwarnings("ignore:CUDA is not available")  # so says an autocast of its own

ON_ONE_KERNEL = ["llama", "qwen2", "qwen3", "mistral_window", "gpt2", "gpt_neox", "phi3"]


@pytest.mark.parametrize("name", ON_ONE_KERNEL)
def test_a_pass_in_bf16_takes_one_attention_kernel_for_each_layer(name: str) -> None:
    model = LanguageModel(build_architecture(name), precision=Precision.BF16)
    with fake_cuda(model.model) as kernels:
        batch = pack_responses([[3, 4, 5], [6, 7]], [[8, 9], [10, 11, 12]], device="cpu").to(CUDA)
        found = model.response_logprobs(batch).logprobs
    assert kernels.operators["_varlen_attn"] == 2
    assert found.device == CUDA
    assert found.dtype == torch.float32


def test_grouped_heads_take_one_kernel_for_each_layer_also_where_it_is_not_told_of_them(monkeypatch) -> None:
    """As in torch 2.11, whose kernel has no `enable_gqa`."""
    kernel, told = varlen.varlen_kernel(), []

    def old(query: Tensor, key: Tensor, *given: Any, scale: float | None, window_size: tuple[int, int]) -> Tensor:
        told.append((query.shape[1], key.shape[1]))
        grouped = {"enable_gqa": True} if varlen.names_grouped_heads(kernel) else {}
        return kernel(query, key, *given, scale=scale, window_size=window_size, **grouped)

    monkeypatch.setattr(varlen, "varlen_kernel", lambda: old)
    base = tiny_language_model("llama", num_attention_heads=4, num_key_value_heads=2, hidden_size=32)
    model = LanguageModel(base, precision=Precision.BF16)
    with fake_cuda(model.model) as kernels:
        model.response_logprobs(pack_responses([[3, 4, 5], [6, 7]], [[8, 9], [10, 11, 12]]).to(CUDA))
    assert told == [(4, 2), (4, 2)]
    assert kernels.operators["_varlen_attn"] == 2


def test_in_float32_there_is_one_call_for_each_sequence() -> None:
    model = LanguageModel(build_architecture("gpt2"))
    with fake_cuda(model.model) as kernels:
        batch = pack_responses([[3, 4, 5], [6, 7]], [[8, 9], [10, 11, 12]], device="cpu").to(CUDA)
        model.response_logprobs(batch)
    assert kernels.operators["_varlen_attn"] == 0


@pytest.mark.parametrize("at_load", [False, True])
def test_in_float32_grouped_heads_are_repeated_for_the_kernel_that_keeps_no_scores(monkeypatch, at_load: bool) -> None:
    """CUDA has one fused kernel for float32, which knows no grouped heads. On a CPU the keys stay as they are.

    `at_load`: in the passes of the probe.
    """
    asked: list[tuple[int, int]] = []

    def noted(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        asked.append((query.shape[1], key.shape[1]))
        assert value.shape[1] == key.shape[1]
        assert given["enable_gqa"] is (query.shape[1] != key.shape[1])
        return query.clone()

    model = LanguageModel(tiny_language_model("llama", num_attention_heads=4, num_key_value_heads=2))
    batch = pack_responses([[3, 4, 5]], [[8, 9]])
    monkeypatch.setitem(fake_cuda_module._ON_CUDA, functional.scaled_dot_product_attention, noted)
    with fake_cuda(model.model):
        if at_load:
            assert len(list(probe._packed_passes(model, batch.packed.to(CUDA)))) == 2
        else:
            model.response_logprobs(batch.to(CUDA))
    assert set(asked) == {(4, 4)}


VIEWS = {"view", "_unsafe_view", "transpose", "t", "unsqueeze", "slice", "expand", "select", "unbind"}


def operators_of_a_decoding_pass(model_type: str, num_layers: int) -> Counter[str]:
    model = LanguageModel(tiny_language_model(model_type, num_hidden_layers=num_layers), precision=Precision.BF16)
    with fake_cuda(model.model) as kernels, casting():
        prompts = pack([[3, 4, 5], [6, 7]]).to(CUDA)
        captured = PromptCache(prompts.lengths)
        model.prefill(prompts, captured)
        cache = RowCache(num_rows=2, initial_tokens=8, max_tokens=16)
        cache.place(captured, 0, [0])
        cache.place(captured, 1, [1])
        tokens = torch.zeros(2, dtype=torch.long).to(CUDA)
        decoder, (layout,) = model.decoder(), cache.passes(range(2), 1)
        kernels.operators.clear()
        decoder(tokens, layout.positions, cache, layout)
    return Counter({name: count for name, count in kernels.operators.items() if name != "device"})  # a question


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral"])
def test_a_layer_decodes_a_token_in_few_operators(model_type: str) -> None:
    """Those that compute: 7 products, 2 norms, 10 for rotary positions, 4 casts (of what both norms give, of queries,
    of keys), 2 for the cache, 1 for attention and a copy of its result, 2 for the gate, 2 residual sums."""
    two, three = (operators_of_a_decoding_pass(model_type, num_layers) for num_layers in (2, 3))
    layer = three - two
    rest = two - layer - layer
    computing = {name: count for name, count in layer.items() if name not in VIEWS}
    assert sum(computing.values()) <= 31, computing
    assert computing["_to_copy"] == 4
    assert computing["_scaled_dot_product_efficient_attention"] == 1
    assert layer.total() <= 76, layer
    assert rest.total() <= 33, rest
