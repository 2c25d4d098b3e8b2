"""Decoding in few operators, against the same model's modules: row by row, pass by pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from architectures import LLAMA_LIKE, build_architecture, enlarge_weights, random_sequences, wide_norms
from proximo.errors import ModelError
from proximo.models.attention.cache import PromptCache, RowCache
from proximo.models.attention.packed import PackedLayout
from proximo.models.backbone import Decoder
from proximo.models.cpu import decoding
from proximo.models.cpu.decoding import DecodingLayers
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.packing import pack
from proximo.models.precision.placement import Precision
from proximo.models.probe import probe_language_model
from proximo.native.library import library

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
OWN_KINDS: dict[str, dict[str, Any]] = {
    "wide heads": {"head_dim": 12},
    "as many key heads": {"num_key_value_heads": 4},
    "yarn": {"rope_parameters": YARN},
    "tied": {"tie_word_embeddings": True},
    "cut short": {"num_hidden_layers": 3},
    "odd": {"intermediate_size": 45},
}
KINDS = ("llama", "mistral_window", "qwen2", *OWN_KINDS)
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
    model.prefill(prompts, captured, PackedLayout(prompts.lengths))
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


@pytest.fixture(params=[True, False], ids=["kernels", "operators"])
def _by_both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(decoding, "kernels_for", lambda _: None)
    elif library() is None:
        pytest.skip("there is no C compiler")


@pytest.mark.usefixtures("_by_both_ways")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_every_row_gets_the_hidden_states_of_the_modules(name: str, dtype: torch.dtype, tolerance: float) -> None:
    model = LanguageModel(build(name, dtype))
    decoder = model.decoder()
    assert isinstance(decoder.__self__, DecodingLayers)
    for ours, expected in zip(decoded(model, decoder), decoded(model, model.backbone.decode), strict=True):
        assert ours.shape == expected.shape
        assert (ours - expected).abs().max() <= tolerance * expected.abs().max()


def test_the_kinds_are_what_they_are_here_for() -> None:
    assert build("yarn").model.rotary_emb.attention_scaling > 1.1
    attention = build("wide heads").model.layers[0].self_attn
    assert attention.q_proj.weight.shape == (48, 32)
    assert all(layer.self_attn.q_proj.bias.abs().min() > 0 for layer in build("qwen2").model.layers)


@pytest.mark.usefixtures("_by_both_ways")
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


CHANGED: dict[str, Callable[[PreTrainedModel], LanguageModel]] = {
    "a hook": hooked,
    "an adapter": lambda model: LanguageModel(model).with_adapter(LoRAOptions(rank=2, alpha=4.0)),
    "half precision": lambda model: LanguageModel(model, precision=Precision.BF16),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_what_someone_has_changed_decodes_as_modules(change: Callable[[PreTrainedModel], LanguageModel]) -> None:
    model = change(build("llama"))
    assert model.decoder() == model.backbone.decode


def test_other_architectures_decode_as_modules() -> None:
    model = LanguageModel(build_architecture("qwen3"))
    assert model.decoder() == model.backbone.decode


class Operators(TorchDispatchMode):
    """How many compute something, and do not just look at a tensor in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func._schema.returns
        self.number += not any(each.alias_info is not None and not each.alias_info.is_write for each in returned)
        return func(*args, **(kwargs or {}))


def test_a_pass_takes_three_quarters_of_the_operators() -> None:
    model = LanguageModel(build("as many key heads"))

    def operators_of(decoder: Decoder) -> int:
        operators = Operators()

        def counted(*given: Any) -> Tensor:
            with operators:
                return decoder(*given)

        decoded(model, counted)
        return operators.number

    numbers = operators_of(model.decoder()), operators_of(model.backbone.decode)
    assert numbers[0] < 0.77 * numbers[1], numbers


def test_the_probe_holds_both_ways_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_far(heads: Tensor, cosines: Tensor, sines: Tensor) -> None:
        heads.mul_(1.01)

    monkeypatch.setattr(decoding, "kernels_for", lambda _: None)
    monkeypatch.setattr(decoding, "rotate_", too_far)
    with pytest.raises(ModelError, match="hidden states decoded with a cache differ by"):
        probe_language_model(LanguageModel(build("llama")))
    probe_language_model(LanguageModel(build_architecture("qwen3")))
