"""The probe refuses what Proximo would run wrongly, one breakage at a time. That it accepts is in test_parity."""

import math

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from architectures import ARCHITECTURES, LLAMA_LIKE, build_architecture
from proximo.errors import ModelError
from proximo.models.attention.cache import RowCache
from proximo.models.attention.packed import ATTENTION, SegmentAttention, band_mask
from proximo.models.language import LanguageModel
from proximo.models.loading import load_language_model
from proximo.models.packing import pack
from proximo.models.precision.placement import Precision, use_tf32, without_tf32
from proximo.models.pretrained.sources import ModelSource
from proximo.models.probe import probe_language_model, probe_scalar_model
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo_cpu import attention as cpu_attention
from proximo_cpu.attention import KernelAttention, Pieces
from proximo_cpu.library import library

SMALL = {"vocab_size": 61, "hidden_size": 32}
REFUSED = {
    "bloom": ({**SMALL, "n_layer": 2, "n_head": 4}, "0 of its 2 layers"),
    "gptj": ({"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, "0 of its 2 layers"),
    "mamba": ({**SMALL, "num_hidden_layers": 2}, "0 of its 2 layers"),
    "jamba": (
        {**LLAMA_LIKE, "num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1},
        "1 of its 3 layers",
    ),
    "qwen3_next": (LLAMA_LIKE, "layers of the kind linear_attention"),
    "llama4_text": ({"vocab_size": 61}, "layers of the kind chunked_attention"),
    "doge": (LLAMA_LIKE, "makes its own attention mask or position bias"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_an_architecture_that_cannot_be_packed_is_refused_by_name_and_with_the_reason(
    model_type: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture
):
    options, reason = REFUSED[model_type]
    with pytest.raises(ModelError, match=reason) as caught:
        load_language_model(ModelSource(config={**options, "model_type": model_type}), device=torch.device("cpu"))
    assert model_type in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def expect_refusal(model: PreTrainedModel, message: str) -> None:
    language_model = LanguageModel(model)
    with pytest.raises(ModelError, match=f"the architecture {model.config.model_type} cannot be run packed.*{message}"):
        probe_language_model(language_model)
    assert model.config._attn_implementation == ATTENTION


def test_a_device_whose_attention_misplaces_a_prefix_is_refused(monkeypatch: pytest.MonkeyPatch):
    """First torch's attention, with the queries aligned to the first keys; then the kernel, without the prefix."""
    message = "the hidden states of sequences that share a prefix differ by"
    with monkeypatch.context() as patch:
        patch.setattr(
            SegmentAttention,
            "_mask",
            lambda self, queries, keys, *others: band_mask(keys, *others)[:queries],
        )
        expect_refusal(build_architecture("llama"), message)
    if library() is not None:
        monkeypatch.setattr(cpu_attention, "Pieces", lambda lengths, _: Pieces(lengths))
        expect_refusal(build_architecture("llama"), message)


def test_a_head_that_scales_its_logits_in_secret_is_refused(monkeypatch: pytest.MonkeyPatch):
    model = build_architecture("llama")
    forward = type(model.lm_head).forward
    monkeypatch.setattr(
        type(model.lm_head), "forward", lambda self, x: forward(self, x) * (1.001 if self is model.lm_head else 1)
    )
    expect_refusal(model, "the logits of its head differ by")


def test_a_layer_that_does_not_ask_for_its_window_is_refused():
    """The window is far longer than the probe, so that no short sequence could notice."""
    model = build_architecture("gemma2")
    for config in (model.config, model.model.config):
        config.sliding_window = 4096
    layers = [layer.self_attn for layer in model.model.layers]
    layers[0].sliding_window = 4096
    probe_language_model(LanguageModel(model))
    layers[0].sliding_window = None
    expect_refusal(model, r"attention windows \[None, None\] where its configuration says \[4096, None\]")


def test_a_model_whose_own_attention_does_something_else_is_refused(monkeypatch: pytest.MonkeyPatch):
    plain = modeling_llama.eager_attention_forward

    def with_a_twist(*arguments, scaling, **options):
        return plain(*arguments, scaling=scaling * 1.01, **options)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", with_a_twist)
    expect_refusal(build_architecture("llama"), "the hidden states of packed sequences differ by")


def test_a_model_that_decodes_differently_with_a_cache_is_refused(monkeypatch: pytest.MonkeyPatch):
    update = RowCache.update

    def forgetful(self, keys, values, layer_index, *rest, **options):
        return update(self, keys * 0.99, values, layer_index, *rest, **options)

    monkeypatch.setattr(RowCache, "update", forgetful)
    expect_refusal(build_architecture("llama"), "hidden states decoded with a cache differ by")


def test_a_model_with_broken_weights_is_refused():
    model = build_architecture("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = math.nan
    with pytest.raises(ModelError, match=r"^the tensor model.layers.1.mlp.down_proj.weight .* 1 of \d+ values"):
        probe_language_model(LanguageModel(model))


def test_an_error_inside_the_model_becomes_a_refusal_that_quotes_it_and_no_memory_does_not(
    monkeypatch: pytest.MonkeyPatch,
):
    model = build_architecture("llama")

    def broken(*_, **__):
        raise error

    monkeypatch.setattr(model.model.rotary_emb, "forward", broken)
    error = KeyError("rope")
    expect_refusal(model, "KeyError: 'rope'")
    error = torch.OutOfMemoryError("no memory")
    with pytest.raises(torch.OutOfMemoryError):
        probe_language_model(LanguageModel(model))


@pytest.mark.parametrize("path", ["plain", "fast"])
def test_attention_of_both_paths_is_held(path: str, monkeypatch: pytest.MonkeyPatch):
    """One sequence at a time, and all of them by the kernel."""
    if path == "fast":
        if library() is None:
            pytest.skip("there is no C compiler")
        owner, name = KernelAttention, "attend"
    else:
        owner, name = torch.nn.functional, "scaled_dot_product_attention"
    as_it_was = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, **options: as_it_was(*given, **options) * 1.1)
    expect_refusal(build_architecture("llama"), "the hidden states of packed sequences differ")


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_model_of_few_positions_is_tried_on_as_many(architecture: str):
    for limit in (8, 4):
        name = "n_positions" if architecture == "gpt2" else "max_position_embeddings"
        config = {**ARCHITECTURES[architecture], name: limit}
        load_language_model(ModelSource(config=config), device=torch.device("cpu"))
    with pytest.raises(ModelError, match=f"the architecture {architecture} cannot be run packed"):
        load_language_model(ModelSource(config={**config, name: 3}), device=torch.device("cpu"))


def test_a_token_that_pads_elsewhere_is_no_reason_to_warn(monkeypatch: pytest.MonkeyPatch):
    """transformers warns of padding where GPT-2 reads a pad token without a mask; here there is no padding."""
    monkeypatch.setattr(PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: pytest.fail("it warns"))
    model = build_architecture("gpt2")
    model.config.pad_token_id = 2
    LanguageModel(model).hidden_states(pack([[4, 5, 2]]))
    scalar_from_language_model(LanguageModel(model), HeadStart.NORMAL).token_scores(pack([[4, 5, 2]]))


def test_dropout_is_off_in_the_probe_and_on_again_afterwards():
    model = build_architecture("gpt2").train()
    probe_language_model(LanguageModel(model))
    assert model.training
    assert model.transformer.drop.training


WITH_CLASSIFIER = [name for name in ARCHITECTURES if name not in ("granite", "cohere")]


@pytest.mark.parametrize("architecture", WITH_CLASSIFIER)
def test_a_scalar_model_is_accepted(architecture: str):
    language_model = LanguageModel(build_architecture(architecture))
    scalar = scalar_from_language_model(language_model, HeadStart.NORMAL)
    weights = {name: weight.clone() for name, weight in scalar.model.state_dict().items()}
    probe_scalar_model(scalar)
    assert not scalar.model.training
    assert all(torch.equal(weight, weights[name]) for name, weight in scalar.model.state_dict().items())


def test_a_scalar_head_that_is_not_the_models_own_score_is_refused(monkeypatch: pytest.MonkeyPatch):
    scalar = scalar_from_language_model(LanguageModel(build_architecture("llama")), HeadStart.NORMAL)
    forward = type(scalar.model).forward

    def shifted(self, *arguments, **options):
        result = forward(self, *arguments, **options)
        result.logits += 0.01
        return result

    monkeypatch.setattr(type(scalar.model), "forward", shifted)
    with pytest.raises(ModelError, match="the scores of its head differ by"):
        probe_scalar_model(scalar)


def test_the_probe_multiplies_in_float32_where_the_run_does_not():
    """Its tolerance is that of float32."""
    seen: list[bool] = []
    model = LanguageModel(build_architecture("llama"))
    model.base.get_submodule("model.norm").register_forward_hook(
        lambda *_: seen.append(torch.backends.cuda.matmul.allow_tf32)
    )
    with without_tf32():  # which puts back what was there
        use_tf32(Precision.TF32)
        probe_language_model(model)
        assert torch.backends.cuda.matmul.allow_tf32
    assert set(seen) == {False}
