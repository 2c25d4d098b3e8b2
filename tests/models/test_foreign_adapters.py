"""Adapters that other tools trained with peft: read as the model that peft makes of them, or refused in one line."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from builders import tiny_language_model, tiny_tokenizer
from proximo.config.run import ModelConfig
from proximo.errors import ModelError
from proximo.models.language import LanguageModel
from proximo.models.loading import check_tokenizer, load_language_model, load_scalar_model
from proximo.models.lora import load_adapter
from proximo.models.packing import pack
from proximo.models.precision.placement import Precision
from proximo.models.pretrained.folders import check_folder
from proximo.models.pretrained.saving import save_pretrained
from proximo.models.pretrained.sources import ModelSource, adapter_base
from proximo.models.scalar import HeadStart
from proximo.models.sharing import base_alone
from proximo.run.make.models import DeviceSpec, build_language_model

IDS = [1, 7, 5, 8, 6, 9, 10]
KINDS: dict[str, dict[str, Any]] = {
    "linear layers": {},
    "a norm": {"modules_to_save": ["norm"]},
    "both matrices": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "the embedding": {"modules_to_save": ["embed_tokens"]},
    "the output layer": {"modules_to_save": ["lm_head"]},
    "two tokens": {"trainable_token_indices": [5, 6]},
    "two tokens of the embedding": {"trainable_token_indices": {"embed_tokens": [5, 6]}},
    "an adapter on the embedding": {"target_modules": ["down_proj", "embed_tokens"]},
    "an adapter on the output layer": {"target_modules": ["down_proj", "lm_head"]},
    "adapters on both": {"target_modules": ["down_proj", "lm_head", "embed_tokens"]},
    "adapters tied": {"target_modules": ["down_proj", "embed_tokens"], "ensure_weight_tying": True},
    "magnitudes": {"use_dora": True, "use_rslora": True},
    "magnitudes of the embedding": {"use_dora": True, "target_modules": ["down_proj", "embed_tokens"]},
}


pytestmark = pytest.mark.usefixtures("folder")


def make_adapter(*, tied: bool = False, rows: int = 64, config: Any = None, **options: Any) -> torch.Tensor:
    """Write an adapter of random numbers to `adapter`, on `base`; returns peft's own logits of IDS."""
    tiny_language_model(tie_word_embeddings=tied).save_pretrained("base")
    base = AutoModelForCausalLM.from_pretrained("base")
    if rows != 64:
        base.resize_token_embeddings(rows, mean_resizing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of tied matrices, and of saving embeddings
        adapted = get_peft_model(
            base, config or LoraConfig(**{"r": 4, "target_modules": ["down_proj"], "task_type": "CAUSAL_LM"} | options)
        ).eval()
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(1)
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.5 * torch.randn_like(parameter))
            expected = adapted(torch.tensor([IDS])).logits[0]
        adapted.save_pretrained("adapter")
    tiny_tokenizer().save_pretrained("adapter")
    return expected


@torch.no_grad()
def logits(path: str) -> torch.Tensor:
    model = load_language_model(ModelSource(path=path), device=torch.device("cpu"))
    return model.head.logits(model.hidden_states(pack([IDS])))


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """But for rounding in float32, in whose last bits a merged matrix differs from a sum of two products."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 5e-5 * max(1, expected.abs().max())


@pytest.mark.parametrize("tied", [False, True], ids=["two matrices", "one matrix"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_model_that_peft_makes_of_it_here_and_in_what_is_saved(kind: str, tied: bool) -> None:
    expected = make_adapter(tied=tied, **KINDS[kind])
    assert_same(logits("adapter"), expected)
    assert (logits("base") - expected).abs().max() > 1e-3 * max(1, expected.abs().max())
    merged = built("adapter")
    assert all(parameter.requires_grad for parameter in merged.parameters())
    save_pretrained(merged, Path("saved"))
    saved = AutoModelForCausalLM.from_pretrained("saved")
    with torch.no_grad():
        assert_same(saved(torch.tensor([IDS])).logits[0], expected)
    is_one = saved.lm_head.weight is saved.model.embed_tokens.weight
    assert json.loads(Path("saved/config.json").read_text())["tie_word_embeddings"] is is_one
    if kind in ("linear layers", "two tokens", "adapters tied"):
        assert is_one is tied


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (66, {}),
        (60, {}),
        (66, {"modules_to_save": ["embed_tokens", "lm_head"]}),
        (67, {"trainable_token_indices": {"embed_tokens": [5, 65], "lm_head": [5, 65]}}),
        (66, {"target_modules": ["down_proj", "embed_tokens"], "tied": True}),
    ],
    ids=["more rows", "fewer rows", "trained rows", "trained tokens", "an adapter on more rows"],
)
def test_it_brings_the_rows_that_it_was_trained_with(rows: int, options: dict[str, Any]) -> None:
    expected = make_adapter(rows=rows, **options)
    assert expected.shape[-1] == rows
    assert_same(logits("adapter"), expected)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("IA3", IA3Config(task_type="CAUSAL_LM", target_modules=["down_proj"], feedforward_modules=["down_proj"])),
        ("PREFIX_TUNING", PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
    ],
)
def test_an_adapter_of_another_kind_is_refused_before_anything_is_read(kind: str, config: Any) -> None:
    """A prefix is no part of the weights: the base alone would answer in its place."""
    make_adapter(config=config)
    for read in (lambda: logits("adapter"), lambda: check_folder(Path("adapter"))):
        with pytest.raises(ModelError, match=f"adapter holds an adapter of the kind {kind}; only LoRA is read"):
            read()


def write_config(**changes: Any) -> None:
    file = Path("adapter/adapter_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alora_invocation_tokens": [3]}, "with alora_invocation_tokens, which cannot be added into the weights"),
        ({"layer_replication": [[0, 2]]}, "with layer_replication"),
        ({"base_model_name_or_path": "./gone"}, "there is no folder ./gone"),
        ({"base_model_name_or_path": None}, "does not name its base model"),
    ],
)
def test_what_its_file_says_is_refused_before_anything_is_read(changes: dict[str, Any], message: str) -> None:
    make_adapter()
    write_config(**changes)
    for read in (lambda: logits("adapter"), lambda: check_folder(Path("adapter"))):
        with pytest.raises(ModelError, match=message):
            read()


def test_what_peft_cannot_merge_is_refused_in_one_line() -> None:
    """A bias of the adapter has no place where the layer below has none."""
    make_adapter(lora_bias=True)
    with pytest.raises(ModelError, match="the adapter cannot be merged into its base: .*bias"):
        built("adapter")


def test_a_configuration_beside_it_changes_nothing_and_whole_weights_beside_it_are_refused() -> None:
    """transformers would then load the base with the adapter inside, or the base in place of the weights."""
    expected = make_adapter(modules_to_save=["lm_head"])
    Path("adapter/config.json").write_bytes(Path("base/config.json").read_bytes())
    assert_same(logits("adapter"), expected)
    Path("adapter/model.safetensors").write_bytes(Path("base/model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"holds an adapter .* and whole weights \(model.safetensors\)"):
        logits("adapter")


def test_a_model_with_it_from_a_program_is_refused_where_the_embedding_is_wrapped() -> None:
    make_adapter(trainable_token_indices=[5])
    model = load_adapter(AutoModelForCausalLM.from_pretrained("base"), Path("adapter"))
    with pytest.raises(ModelError, match="is a TrainableTokensWrapper.*merge_and_unload"):
        LanguageModel(model)


def test_the_reference_below_it_is_without_what_it_replaced() -> None:
    make_adapter(modules_to_save=["norm"])
    model = load_adapter(AutoModelForCausalLM.from_pretrained("base"), Path("adapter"))
    with torch.no_grad():
        below = base_alone(LanguageModel(model))
        found = below.head.logits(below.hidden_states(pack([IDS])))
    assert_same(found, logits("base"))


def built(path: str, **options: Any) -> Any:
    spec = DeviceSpec(device=torch.device("cpu"), precision=Precision.FLOAT32, seed=0)
    return build_language_model(ModelConfig(path=path, **options), tiny_tokenizer(), device_spec=spec).model


def test_what_peft_warns_of_is_passed_on_unless_it_is_settled_here() -> None:
    make_adapter(exclude_modules=["nothing"])
    with pytest.warns(UserWarning, match="exclude_modules=.* but no modules were excluded"):
        load_adapter(tiny_language_model(), Path("adapter"))


COMMIT = "1" * 40


def put_on_hub(name: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the Hub's cache keeps what was fetched: it is read from there without a network."""
    place = Path("hub", f"models--{name.replace('/', '--')}")
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(COMMIT)
    shutil.copytree(folder, place / "snapshots" / COMMIT)
    (place / ".no_exist" / COMMIT).mkdir(parents=True)
    for file in {"config.json", "tokenizer.json", "tokenizer_config.json"} - {
        each.name for each in Path(folder).iterdir()
    }:
        (place / ".no_exist" / COMMIT / file).touch()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(place.parent.absolute()))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("with_config", [False, True], ids=["alone", "with a configuration"])
def test_one_of_the_hub_is_read_as_one_in_a_folder(with_config: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = make_adapter()
    if with_config:
        shutil.copyfile("base/config.json", "adapter/config.json")
    put_on_hub("someone/adapter", "adapter", monkeypatch)
    shutil.rmtree("adapter")
    assert_same(logits("someone/adapter"), expected)
    source = ModelSource(path="someone/adapter")
    assert adapter_base(source) == ModelSource(path="base")
    check_tokenizer(source, tiny_tokenizer(), role="policy")
    with pytest.raises(ModelError, match="someone/adapter holds an adapter only"):
        load_scalar_model(source, fresh_head=HeadStart.ZERO, device=torch.device("cpu"))
    with pytest.raises(ModelError, match="someone/adapter is an adapter itself"):
        built("someone/adapter", lora={"rank": 2})


def test_one_of_the_hub_goes_with_the_tokenizer_of_its_base_and_an_unknown_name_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_adapter()
    for file in Path("adapter").glob("token*"):
        file.unlink()
    put_on_hub("someone/adapter", "adapter", monkeypatch)
    check_tokenizer(ModelSource(path="someone/adapter"), tiny_tokenizer(), role="policy")
    assert adapter_base(ModelSource(path="someone/other")) is None
    with pytest.raises(ModelError, match="the configuration of someone/other cannot be read"):
        logits("someone/other")
