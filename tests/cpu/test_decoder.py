"""Decoding by the kernel against the same model's modules: row by row, pass by pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from architectures import LLAMA_LIKE, build_architecture, enlarge_weights, random_sequences, wide_norms
from proximo.models.attention.cache import PromptCache, RowCache
from proximo.models.fast_path import Decoder
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.packing import pack
from proximo.models.precision.compute import cast_weight, casting
from proximo.models.precision.placement import Precision
from proximo_cpu import decoder as decoder_module
from proximo_cpu.decoder import KernelDecoder
from proximo_cpu.library import library

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
OWN_KINDS: dict[str, dict[str, Any]] = {
    "wide heads": {"head_dim": 12},
    "as many key heads": {"num_key_value_heads": 4},
    "yarn": {"rope_parameters": YARN},
    "tied": {"tie_word_embeddings": True},
    "cut short": {"num_hidden_layers": 3},
    "odd": {"intermediate_size": 45},
}
pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")
FAMILIES = ("llama", "mistral_window", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "opt", "phi3", "olmo2", "smollm3")
KINDS = (*FAMILIES, *OWN_KINDS)
NUM_ROWS = 4


def build(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    if name not in OWN_KINDS:
        return build_architecture(name, dtype=dtype)
    config = AutoConfig.for_model(**{**LLAMA_LIKE, "model_type": "llama", **OWN_KINDS[name]})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        enlarge_weights(model)
    if name == "cut short":
        config.num_hidden_layers = 2
    return wide_norms(model).eval()


@torch.no_grad()
def decoded(model: LanguageModel, decoder: Decoder) -> list[Tensor]:
    """Hidden states of each pass: samples of one prompt beside another's, rows that grow, move and are given anew."""
    prompts = pack(random_sequences([7, 2, 4]))
    captured = PromptCache(prompts.lengths)
    model.prefill(prompts, captured)
    cache = RowCache(num_rows=NUM_ROWS, initial_tokens=8, max_tokens=40)
    cache.place(captured, 0, [0, 2])
    cache.place(captured, 1, [1, 3])
    passes: list[Tensor] = []

    def go_on(num_rows: int, num_passes: int) -> None:
        for _ in range(num_passes):
            tokens = torch.arange(num_rows) * 7 + 3 * len(passes) + 3
            layout = cache.advance(num_rows)
            passes.append(decoder(tokens % 61, layout.positions, cache, layout))
            assert layout.num_calls == 2

    go_on(4, 9)
    cache.move(3, 1)
    go_on(3, 5)
    cache.place(captured, 2, [0])
    go_on(3, 8)
    return passes


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "adapter"])
@pytest.mark.parametrize("name", KINDS)
def test_every_row_gets_the_hidden_states_of_the_modules(name: str, adapter: bool) -> None:
    model = LanguageModel(build(name))
    if adapter:
        model = model.with_adapter(LoRAOptions(rank=2, alpha=4.0))
        for path, weight in model.trainable_parameters():
            if "lora_B" in path:
                weight.data.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    decoder = model.decoder()
    assert isinstance(decoder.__self__, KernelDecoder)
    for ours, expected in zip(decoded(model, decoder), decoded(model, model.backbone.decode), strict=True):
        assert ours.shape == expected.shape
        assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_the_kinds_are_what_they_are_here_for() -> None:
    assert build("yarn").model.rotary_emb.attention_scaling > 1.1
    attention = build("wide heads").model.layers[0].self_attn
    assert attention.q_proj.weight.shape == (48, 32)
    assert all(layer.self_attn.q_proj.bias.abs().min() > 0 for layer in build("qwen2").model.layers)


def test_two_runs_are_equal_bit_for_bit_and_copy_no_weights() -> None:
    model = LanguageModel(build("llama"))
    decoder = model.decoder()
    first = decoded(model, decoder)
    assert all(map(torch.equal, first, decoded(model, decoder)))
    with torch.no_grad():
        for weight in model.backbone.layers.parameters():
            weight.mul_(1.1)
    moved, expected = decoded(model, decoder), decoded(model, model.backbone.decode)
    assert (moved[-1] - expected[-1]).abs().max() <= 1e-5 * expected[-1].abs().max()
    assert (moved[-1] - first[-1]).abs().max() > 0.01


def hooked(model: PreTrainedModel) -> LanguageModel:
    model.get_submodule("model.layers.1.mlp").register_forward_hook(lambda *_: None)
    return LanguageModel(model)


def narrowed(model: PreTrainedModel) -> LanguageModel:
    half = LanguageModel(model.requires_grad_(False), precision=Precision.BF16)
    half.narrow_frozen()
    return half


CHANGED: dict[str, Callable[[PreTrainedModel], LanguageModel]] = {
    "a hook": hooked,
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_what_someone_has_changed_decodes_as_modules(change: Callable[[PreTrainedModel], LanguageModel]) -> None:
    model = change(build("llama"))
    assert model.decoder() == model.backbone.decode


def test_other_architectures_decode_as_modules() -> None:
    model = LanguageModel(build_architecture("granite"))
    assert model.decoder() == model.backbone.decode


def test_float64_decodes_as_modules() -> None:
    model = LanguageModel(build("llama", torch.float64))
    assert model.decoder() == model.backbone.decode


def test_in_bf16_the_kernel_decodes_and_so_do_the_modules_where_it_must_not() -> None:
    model = LanguageModel(build("llama"), precision=Precision.BF16)
    exact = decoded(LanguageModel(build("llama")), LanguageModel(build("llama")).backbone.decode)
    for decoder in (model.decoder(), model.backbone.decode):
        for ours, expected in zip(decoded(model, decoder), exact, strict=True):
            assert (ours - expected).norm() <= 0.1 * expected.norm()


def test_frozen_matrices_that_are_stored_in_bf16_decode_with_the_same_bits() -> None:
    stored, cast = narrowed(build("llama")), LanguageModel(build("llama"), precision=Precision.BF16)
    decoders = stored.decoder(), cast.decoder()
    assert all(isinstance(decoder.__self__, KernelDecoder) for decoder in decoders)
    assert all(map(torch.equal, decoded(stored, decoders[0]), decoded(cast, decoders[1])))


def test_within_a_rollout_the_kernel_reads_the_casts_that_prompts_were_computed_with() -> None:
    model = LanguageModel(build("llama"), precision=Precision.BF16)
    matrices = {weight.data_ptr(): weight for weight in model.backbone.matrices}
    with casting():
        decoder = model.decoder().__self__
        assert isinstance(decoder, KernelDecoder)
        read = {layer.query.weight for layer in decoder._layers}
        assert read == {cast_weight(w, torch.bfloat16).data_ptr() for w in matrices.values()} & read
        assert len(read) == 2
    assert not read & matrices.keys()


def test_without_kernels_the_modules_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "library", lambda: None)
    model = LanguageModel(build("llama"))
    assert model.decoder() == model.backbone.decode


def test_whoever_watches_the_operators_sees_those_of_the_modules() -> None:
    """A mode that was entered after the decoder was obtained, and that a kernel would run past."""
    model = LanguageModel(build("llama"))
    decoder = model.decoder()

    def watched(decoder: Decoder) -> tuple[list[Tensor], int]:
        with FlopCounterMode(display=False) as counter:
            passes = decoded(model, decoder)
        return passes, counter.get_total_flops()

    (ours, operations), (expected, expected_operations) = watched(decoder), watched(model.backbone.decode)
    assert operations == expected_operations
    assert all(map(torch.equal, ours, expected))
