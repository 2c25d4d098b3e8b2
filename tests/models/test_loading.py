"""From folders, configs and seeds to models; one message for each way in which that can fail."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from architectures import LLAMA_LIKE, build_architecture, random_sequences
from builders import tiny_model_with_pictures, tiny_tokenizer
from docs.pages import ROOT, blocks
from proximo.distributed.unread_parameters import read_all
from proximo.errors import ModelError
from proximo.models.language import LanguageModel
from proximo.models.loading import load_language_model, load_scalar_model
from proximo.models.lora import LoRAOptions
from proximo.models.packing import pack
from proximo.models.precision.placement import Precision
from proximo.models.pretrained.folders import refuse_other_inputs
from proximo.models.pretrained.saving import save_pretrained
from proximo.models.pretrained.sources import ModelSource
from proximo.models.pretrained.vocabulary import load_tokenizer, resize_vocabulary
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model

CPU = torch.device("cpu")
PACKED = pack(random_sequences([9, 4]))
CONFIG = {**LLAMA_LIKE, "model_type": "llama"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved tiny Llama."""
    build_architecture("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def load(path: Path | str, **options: Any) -> LanguageModel:
    return load_language_model(ModelSource(path=str(path)), device=CPU, **options)


def load_scalar(path: Path | str, fresh_head: HeadStart | None = None, **options: Any) -> ScalarModel:
    return load_scalar_model(ModelSource(path=str(path)), fresh_head=fresh_head, device=CPU, **options)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@torch.no_grad()
def test_a_folder_loads_bit_for_bit_in_eval_mode(folder: Path, capfd: pytest.CaptureFixture):
    model = load(folder)
    assert model.hidden_states(PACKED).equal(LanguageModel(build_architecture("llama")).hidden_states(PACKED))
    assert not model.model.training
    assert capfd.readouterr() == ("", "")


def test_a_model_that_was_read_whole_from_its_shards_has_the_kernels_of_any_other(folder: Path):
    model = load(folder, by_shards=True)
    read_all(model.model)
    assert {type(parameter) for parameter in model.model.parameters()} == {torch.nn.Parameter}
    decoders = [each.backbone.decoder() for each in (model, load(folder))]
    assert len({type(getattr(each, "__self__", each)) for each in decoders}) == 1
    assert model.hidden_states(PACKED).equal(load(folder).hidden_states(PACKED))


@pytest.mark.parametrize("kind", ["llama", "phi"])
def test_a_vocabulary_grows_in_the_files_as_in_memory(kind: str, tmp_path: Path):
    """The output layer of Phi has a bias."""
    plain = build_architecture(kind)
    for name, parameter in plain.named_parameters():
        if "lm_head" in name:
            torch.nn.init.normal_(parameter)
    plain.save_pretrained(tmp_path)
    grown = [load(tmp_path, by_shards=by_shards).model for by_shards in (False, True)]
    for model in grown:
        resize_vocabulary(model, 300)
        read_all(model)
    loaded, read = (model.state_dict() for model in grown)
    assert loaded.keys() == read.keys()
    assert all(read[name].equal(tensor) for name, tensor in loaded.items())


@pytest.mark.parametrize("precision", Precision)
def test_weights_become_float32_whatever_the_checkpoint_holds(folder: Path, precision: Precision):
    build_architecture("llama").to(torch.bfloat16).save_pretrained(folder)
    model = load(folder, precision=precision)
    assert {parameter.dtype for parameter in model.model.parameters()} == {torch.float32}
    assert model.precision is precision


@torch.no_grad()
def test_a_random_start_is_a_function_of_its_seed_alone():
    def hidden(seed: int) -> torch.Tensor:
        return load_language_model(ModelSource(config=CONFIG, seed=seed), device=CPU).hidden_states(PACKED)

    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    first = hidden(1)
    assert torch.rand(2).equal(expected)
    assert first.equal(hidden(1))
    assert not first.equal(hidden(2))


def test_a_random_start_takes_size_and_special_ids_from_the_tokenizer():
    """A class's default end token, 2 for Llama, may be any letter of this tokenizer."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|user|>"
    options = {key: value for key, value in CONFIG.items() if key not in ("vocab_size", "eos_token_id")}
    model = load_language_model(ModelSource(config=options), device=CPU, tokenizer=tokenizer).base
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id == 3
    given = load_language_model(ModelSource(config=CONFIG), device=CPU, tokenizer=tokenizer).base
    assert (given.config.vocab_size, given.config.eos_token_id) == (61, 2)


@torch.no_grad()
def test_an_adapter_folder_loads_with_its_base(folder: Path, tmp_path: Path):
    model = load(folder).with_adapter(LoRAOptions(rank=2))
    for _, parameter in model.trainable_parameters():
        parameter.add_(0.05)
    save_pretrained(model.model, tmp_path / "adapter")
    again = load(tmp_path / "adapter")
    assert again.has_adapter
    assert again.hidden_states(PACKED).equal(model.hidden_states(PACKED))
    assert len(again.trainable_parameters()) == len(model.trainable_parameters())


def test_an_adapter_that_does_not_name_its_base_is_refused(folder: Path, tmp_path: Path):
    model = LanguageModel(build_architecture("llama")).with_adapter(LoRAOptions(rank=2))
    save_pretrained(model.model, tmp_path / "adapter")
    with pytest.raises(ModelError, match="does not name its base model"):
        load(tmp_path / "adapter")


@torch.no_grad()
def test_a_classifier_keeps_its_head_and_a_language_model_gets_a_fresh_one(folder: Path, tmp_path: Path):
    reward = scalar_from_language_model(load(folder), HeadStart.NORMAL, seed=4)
    save_pretrained(reward.model, tmp_path / "reward")
    for fresh_head in (None, HeadStart.ZERO):
        again = load_scalar(tmp_path / "reward", fresh_head)
        assert again.token_scores(PACKED).equal(reward.token_scores(PACKED))
    assert not load_scalar(folder, HeadStart.ZERO).token_scores(PACKED).any()
    assert load_scalar(folder, HeadStart.NORMAL, seed=4).token_scores(PACKED).equal(reward.token_scores(PACKED))
    at_random = load_scalar_model(ModelSource(config=CONFIG, seed=1), fresh_head=HeadStart.NORMAL, device=CPU)
    assert at_random.sequence_scores(PACKED).shape == (2,)


def cut_in_half(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def drop_a_tensor(path: Path) -> None:
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})


CONFIG_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown type": ({"model_type": "lama"}, "the configuration of .* cannot be read: .*lama"),
    "wrong shape": (
        {"hidden_size": 16},
        r"do not fit a LlamaForCausalLM: 21 of another shape: lm_head\.weight \(\[61, 32\], not \[61, 16\]\)",
    ),
    "a layer too many": ({"num_hidden_layers": 1}, r"9 left over: model\.layers\.1\..* and 5 more"),
    "an encoder": ({"model_type": "bert"}, "is an encoder .bert.: its tokens see what follows"),
    "an encoder-decoder": ({"model_type": "t5", "is_encoder_decoder": True}, "is an encoder-decoder model .t5."),
    "an image model": ({"model_type": "vit"}, "is a vit model, and transformers has no causal language model of this"),
    "a quantised model": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "is quantised"),
}
FILE_FAULTS: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "no config": ("config.json", Path.unlink, r"is not a model folder: there is no config\.json in it"),
    "broken config": (
        "config.json",
        lambda path: path.write_text('{"model_type": "llama", '),
        "the configuration of .* cannot be read",
    ),
    "no weights": ("model.safetensors", Path.unlink, "the weights of .* cannot be read: .*model.safetensors"),
    "cut weights": ("model.safetensors", cut_in_half, "the weights of .* cannot be read"),
    "a tensor too few": (
        "model.safetensors",
        drop_a_tensor,
        r"do not fit a LlamaForCausalLM: 1 missing: model\.layers\.1\.mlp\.up_proj\.weight",
    ),
}
NAMES = {
    "llama/nothing": "there is no folder .*nothing .seen from .*; give a model folder, or a Hub name",
    "nobody/no-such-model": "the configuration of nobody/no-such-model cannot be read",
}


@pytest.mark.parametrize("fault", [*CONFIG_FAULTS, *FILE_FAULTS, *NAMES])
def test_what_cannot_be_loaded_is_one_message(fault: str, folder: Path, capfd: pytest.CaptureFixture):
    if fault in CONFIG_FAULTS:
        changes, message = CONFIG_FAULTS[fault]
        edit_config(folder, **changes)
    elif fault in FILE_FAULTS:
        name, spoil, message = FILE_FAULTS[fault]
        spoil(folder / name)
    else:
        message = NAMES[fault]
    path = fault if fault.startswith("nobody") else folder / "nothing" if fault in NAMES else folder
    with pytest.raises(ModelError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert capfd.readouterr() == ("", "")


def test_a_model_of_another_kind_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(ModelError, match="without a trained scalar head"):
        load_scalar(folder)
    save_pretrained(load(folder).with_adapter(LoRAOptions(rank=2)).model, tmp_path / "adapter")
    with pytest.raises(ModelError, match="holds an adapter only"):
        load_scalar(tmp_path / "adapter", HeadStart.ZERO)
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3).save_pretrained(tmp_path / "three")
    with pytest.raises(ModelError, match="has 3 labels"):
        load_scalar(tmp_path / "three")
    save_pretrained(load_scalar(folder, HeadStart.ZERO).model, tmp_path / "reward")
    with pytest.raises(ModelError, match=r"1 missing: lm_head\.weight; 1 left over: score\.weight"):
        load(tmp_path / "reward")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "lama"}, "model_type 'lama' is unknown .*did you mean 'llama'"),
        ({}, "model_type None is unknown"),
        ({**CONFIG, "hiden_size": 16}, "a llama config has no key 'hiden_size'; did you mean 'hidden_size'"),
        ({**CONFIG, "hidden_size": "big"}, "not a valid llama config"),
        ({**CONFIG, "hidden_size": 30, "num_attention_heads": 4}, "llama"),
        ({"model_type": "bart"}, "is an encoder-decoder model"),
    ],
)
def test_a_config_that_means_nothing_is_one_message(config: dict, message: str):
    with pytest.raises(ModelError, match=message) as caught:
        load_language_model(ModelSource(config=config), device=CPU)
    assert "\n" not in str(caught.value)


def test_a_source_is_a_path_or_a_config_and_not_both():
    with pytest.raises(ModelError, match="exactly one"):
        ModelSource()
    with pytest.raises(ModelError, match="exactly one"):
        ModelSource(path="x", config=CONFIG)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_return_sequences": 4}, "transformers refuses the generation_config.json of .*num_return_sequences"),
        ({"early_stopping": "x"}, "transformers refuses the generation_config.json"),
        ({"watermarking_config": 3}, "transformers refuses the generation_config.json"),
        ({"eos_token_id": "2"}, "eos_token_id in the generation_config.json of .* is '2', but must be numbers"),
        ({"eos_token_id": [2, 3.5]}, r"is \[2, 3.5\], but must be numbers"),
    ],
)
def test_generation_settings_that_no_library_takes_are_named_before_the_weights_are_read(
    settings: dict[str, Any], message: str, folder: Path
):
    (folder / "generation_config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=f"{message}.*mend generation_config.json, or remove it"):
        load(folder)


MORE = ["gemma3", "emu3", "git", "phi4_multimodal", "moshi"]


@pytest.mark.parametrize("kind", MORE)
def test_a_model_that_reads_more_than_text_is_refused_before_its_weights(kind: str, tmp_path: Path):
    """transformers has a causal language model of each, with the other parts or silently without them."""
    CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"reads more than text \\({kind}, with .*_config\\).*docs/faq.md"):
        load(tmp_path)


def test_models_of_text_are_taken_for_that_until_they_have_other_parts():
    for kind in ("llama", "gemma3_text", "qwen3", "gpt2", "mpt", "dbrx", "mixtral"):
        config = CONFIG_MAPPING[kind]().to_dict()
        refuse_other_inputs(config, kind)
        with pytest.raises(ModelError, match="reads more than text"):
            refuse_other_inputs(config | {"vision_config": {"hidden_size": 8}}, kind)


def test_the_text_part_of_a_model_with_pictures_loads_once_it_is_saved_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    whole = tiny_model_with_pictures()
    whole.save_pretrained("google/gemma-3-4b-it")
    tiny_tokenizer().save_pretrained("google/gemma-3-4b-it")
    (block,) = (each for each in blocks(ROOT / "docs" / "faq.md", "python") if "gemma-3-4b-it" in each.text)
    exec(block.text, {})
    text = load("gemma-3-text")
    sequence = random_sequences([9])[0]
    with torch.no_grad():
        expected = whole(input_ids=torch.tensor([sequence])).logits[0]
        torch.testing.assert_close(text.head.logits(text.hidden_states(pack([sequence]))), expected, atol=2e-5, rtol=0)
    assert json.loads(Path("gemma-3-text/config.json").read_text())["model_type"] == "gemma3_text"
    assert load_tokenizer("gemma-3-text").get_vocab() == tiny_tokenizer().get_vocab()
