"""A tokenizer that is not the model's is refused for every role, before any weight is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from builders import tiny_language_model, tiny_tokenizer
from proximo.commands.generate import GenerateOptions, generate
from proximo.errors import ModelError
from proximo.models import loading
from proximo.models.language import LanguageModel
from proximo.models.pretrained.saving import save_pretrained
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.rollout.sampling import SamplingOptions
from proximo.trainer_kinds import recipe_kind
from tiny_runs import LLAMA, Kind, changed, make_inputs, recipe_of


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs of all trainers, with strangers: a larger tokenizer, one with other ids, one with a token more."""
    place = make_inputs(tmp_path_factory.mktemp("inputs"))
    names = sorted(tiny_tokenizer().get_vocab(), key=tiny_tokenizer().get_vocab().get)
    whole = _of_words([*names, *(f"word{i}" for i in range(8))])
    whole.save_pretrained(place / "large")
    _of_words([*names[:3], *reversed(names[3:])]).save_pretrained(place / "turned")
    more = tiny_tokenizer()
    more.add_special_tokens({"additional_special_tokens": ["<n1>", "<n2>", "<n3>"]})
    more.save_pretrained(place / "more")
    save_pretrained(tiny_language_model(num_hidden_layers=1), place / "bare")
    scalar = scalar_from_language_model(LanguageModel(tiny_language_model(num_hidden_layers=1)), HeadStart.NORMAL)
    save_pretrained(scalar.model, place / "bare_reward")
    save_pretrained(scalar.model, place / "strange_reward")
    whole.save_pretrained(place / "strange_reward")
    save_pretrained(tiny_language_model(num_hidden_layers=1), place / "strange")
    whole.save_pretrained(place / "strange")
    return place


def _of_words(words: list[str]) -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(words)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<eos>")


def built(kind: Kind, recipe: dict[str, Any]) -> Any:
    return recipe_kind(kind).build(recipe_kind(kind).schema.model_validate(recipe))


def build(kind: Kind, place: Path, **changes: Any) -> Any:
    recipe = changed(recipe_of(kind, place), {key.replace("__", "."): value for key, value in changes.items()})
    return built(kind, recipe)


def at(place: Path, name: str) -> str:
    return str(place / name)


LARGE = {"model": {"path": "bare"}, "tokenizer": {"path": "large"}}
ROLES = {
    "sft": ("sft", "policy", LARGE),
    "reward model": ("reward", "reward", LARGE),
    "dpo reference": ("dpo", "reference", {"reference": {"path": "strange"}}),
    "policy": ("ppo", "policy", LARGE),
    "reference": ("ppo", "reference", {"reference": {"path": "strange"}}),
    "value": ("ppo", "value", {"value": {"path": "strange_reward"}}),
    "reward source": ("ppo", "reward", {"reward": [{"kind": "model", "path": "strange_reward"}]}),
    "reward source with a tokenizer of its own": (
        "ppo",
        "reward",
        {"reward": [{"kind": "model", "path": "bare_reward", "tokenizer": "large"}]},
    ),
    "random start": ("sft", "policy", {**LARGE, "model": {"config": {**LLAMA, "vocab_size": 64}}}),
}


@pytest.mark.parametrize("name", ROLES)
def test_a_larger_tokenizer_is_refused_for_each_role_before_weights_are_read(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, role, sections = ROLES[name]
    recipe = changed(recipe_of(kind, place), {})
    if kind == "ppo":
        recipe |= {"reward": recipe["reward"][1:], "value": {"init_from": "policy"}}
    recipe |= _absolute(sections, place)
    monkeypatch.setattr(loading, "_saved_model", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr(loading, "random_model", lambda *_: pytest.fail("weights were drawn"))
    with pytest.raises(ModelError, match=f"{role} model"):
        built(kind, recipe)


def _absolute(value: Any, place: Path) -> Any:
    if isinstance(value, dict):
        return {
            key: str(place / each) if key in ("path", "tokenizer") and isinstance(each, str) else _absolute(each, place)
            for key, each in value.items()
        }
    return [_absolute(each, place) for each in value] if isinstance(value, list) else value


def test_a_tokenizer_of_the_right_size_with_other_ids_is_refused(place: Path) -> None:
    with pytest.raises(ModelError, match="the tokenizer is not that of the policy model: they differ in"):
        build("sft", place, model={"path": at(place, "language_model")}, tokenizer={"path": at(place, "turned")})


def test_tokens_on_top_need_to_be_named_and_then_every_role_grows(place: Path) -> None:
    bare, more = {"path": at(place, "bare")}, at(place, "more")
    with pytest.raises(ModelError, match=r"embeds only 64.*name <n2>, <n3> in tokenizer.added_tokens"):
        build("dpo", place, model=bare, tokenizer={"path": more})
    with pytest.raises(ModelError, match="name <n3> in tokenizer.added_tokens"):
        build("dpo", place, model=bare, tokenizer={"path": more, "added_tokens": ["<n1>", "<n2>"]})
    for model in (bare, {"path": at(place, "language_model")}):
        named = {"path": more, "added_tokens": ["<n1>", "<n2>", "<n3>"]}
        task = build("dpo", place, model=model, reference=model, tokenizer=named)
        assert task.model.vocab_size == task.reference.vocab_size == 66


def test_spare_rows_are_no_mistake(place: Path) -> None:
    save_pretrained(tiny_language_model(vocab_size=72, num_hidden_layers=1), place / "spare")
    assert build("sft", place, model={"path": at(place, "spare")}).model.vocab_size == 72


def test_generate_refuses_it_before_weights_are_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_saved_model", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ModelError, match="has 71 tokens, but the policy model embeds only 64; take the tokenizer"):
        generate(
            at(place, "strange"), ["ab"], GenerateOptions(sampling=SamplingOptions(max_new_tokens=2), device="cpu")
        )


@pytest.mark.parametrize("name", ["pad_token_id", "eos_token_id"])
def test_a_random_start_whose_special_ids_are_beyond_its_vocabulary_is_refused(name: str) -> None:
    """transformers refuses a pad id there with a bare assertion, and an end of sequence not at all."""
    source = loading.ModelSource(config={**LLAMA, name: 63})
    with pytest.raises(ModelError, match=f"{name} 63, but only 63 tokens"):
        loading.load_language_model(source, device=torch.device("cpu"), tokenizer=tiny_tokenizer())
