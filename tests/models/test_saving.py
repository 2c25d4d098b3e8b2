"""Saved weights come back in place, bit for bit, or not at all."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from architectures import ARCHITECTURES, build_architecture
from builders import tiny_language_model
from proximo.errors import CheckpointError
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions, load_adapter
from proximo.models.pretrained.saving import load_weights, save_pretrained
from proximo.models.pretrained.vocabulary import resize_vocabulary, vocabulary_layers
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.models.transformers_model import base_of


def shake(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_come_back_in_place_bit_for_bit(architecture: str, tmp_path: Path, capfd: pytest.CaptureFixture):
    model = LanguageModel(build_architecture(architecture)).model
    shake(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    save_pretrained(model, tmp_path)
    shake(model)
    load_weights(model, tmp_path)
    assert all(parameter.equal(before[name]) for name, parameter in model.named_parameters())
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert capfd.readouterr() == ("", "")


def test_tied_weights_stay_tied_and_the_saved_configuration_does_not_name_our_attention(tmp_path: Path):
    model = LanguageModel(build_architecture("qwen2")).model
    save_pretrained(model, tmp_path)
    shake(model)
    load_weights(model, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "proximo" not in (tmp_path / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
    assert AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight.equal(model.lm_head.weight)


def test_scalar_models_and_adapters_come_back_too(tmp_path: Path):
    origin = LanguageModel(build_architecture("llama"))
    scalar = scalar_from_language_model(origin, HeadStart.NORMAL)
    adapted_scalar = scalar_from_language_model(origin, HeadStart.NORMAL).with_adapter(LoRAOptions(rank=2))
    adapted = origin.with_adapter(LoRAOptions(rank=2))
    for index, model in enumerate((scalar.model, adapted_scalar.model, adapted.model)):
        shake(model)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        save_pretrained(model, tmp_path / str(index))
        shake(model)
        load_weights(model, tmp_path / str(index))
        assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("tied", [False, True], ids=["two matrices", "one matrix"])
def test_rows_that_were_added_below_an_adapter_come_back_too(tied: bool, tmp_path: Path):
    tiny_language_model(tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    models = []
    for _ in range(2):
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        resize_vocabulary(base, 66)
        models.append(LanguageModel(base).with_adapter(LoRAOptions(rank=2)).model)
    shake(models[0])
    with torch.no_grad():
        for layer in (models[0].get_input_embeddings(), models[0].get_output_embeddings()):
            layer.weight[64:] += 0.5  # unlike the mean of the others
    save_pretrained(models[0], tmp_path / "adapter")
    load_weights(models[1], tmp_path / "adapter")
    second = models[1].state_dict()
    assert all(tensor.equal(second[name]) for name, tensor in models[0].state_dict().items())


@pytest.mark.parametrize("base", ["", "gone"], ids=["unnamed", "deleted"])
def test_rows_that_were_added_are_saved_where_the_base_cannot_be_read(base: str, tmp_path: Path):
    model = LanguageModel(tiny_language_model())
    model.base.config._name_or_path = base and str(tmp_path / base)
    resize_vocabulary(model.base, 66)
    adapted = model.with_adapter(LoRAOptions(rank=2))
    save_pretrained(adapted.model, tmp_path / "adapter")
    loaded = base_of(load_adapter(tiny_language_model(seed=9), tmp_path / "adapter"))
    for layer, saved in zip(vocabulary_layers(adapted.base), vocabulary_layers(loaded), strict=True):
        assert saved.weight.equal(layer.weight)


@pytest.mark.parametrize("says_tied", [False, True])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_saved_configuration_says_whether_there_are_two_matrices(says_tied: bool, is_tied: bool, tmp_path: Path):
    """It may be that of a model from a program, or of a file that another tool wrote."""
    model = tiny_language_model(tie_word_embeddings=is_tied)
    model.config.tie_word_embeddings = says_tied
    wanted = model.lm_head.weight.detach().clone()
    loaded = LanguageModel(model).model
    resize_vocabulary(loaded, 66)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is is_tied
    save_pretrained(loaded, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.tie_word_embeddings is is_tied
    assert again.lm_head.weight[:64].equal(wanted)


def test_the_weights_of_another_model_are_refused_and_nothing_is_changed(tmp_path: Path):
    save_pretrained(build_architecture("qwen2"), tmp_path)
    model = build_architecture("llama")
    model.config.num_hidden_layers = 1
    save_pretrained(build_architecture("llama"), tmp_path / "llama")
    small = AutoModelForCausalLM.from_config(model.config)
    before = {name: tensor.clone() for name, tensor in small.state_dict().items()}
    with pytest.raises(CheckpointError, match="9 differ in name or shape, such as model.layers.1"):
        load_weights(small, tmp_path / "llama")
    assert all(tensor.equal(before[name]) for name, tensor in small.state_dict().items())


def test_another_adapter_is_refused(tmp_path: Path):
    narrow = LanguageModel(build_architecture("llama")).with_adapter(LoRAOptions(rank=2, target_modules=("q_proj",)))
    wide = LanguageModel(build_architecture("llama")).with_adapter(LoRAOptions(rank=2))
    save_pretrained(narrow.model, tmp_path / "narrow")
    save_pretrained(wide.model, tmp_path / "wide")
    with pytest.raises(CheckpointError, match="another adapter"):
        load_weights(wide.model, tmp_path / "narrow")
    with pytest.raises(CheckpointError, match="another adapter"):
        load_weights(narrow.model, tmp_path / "wide")
