"""A value head on the policy's own layers: the same tensors, its own head, which alone is saved."""

from pathlib import Path

import pytest
import torch

from architectures import build_architecture, random_sequences
from builders import tiny_language_model
from proximo.errors import CheckpointError, ModelError
from proximo.models.language import LanguageModel
from proximo.models.loading import load_scalar_model
from proximo.models.lora import LoRAOptions
from proximo.models.packing import pack
from proximo.models.precision.placement import Precision
from proximo.models.pretrained.saving import save_pretrained
from proximo.models.pretrained.sources import ModelSource
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.models.sharing import copy_head, is_on_trunk, load_head, refuse_half_shared, save_head, scalar_on

LENGTHS = [9, 3, 14, 6]


def policy(*, adapter: bool = False, **options) -> LanguageModel:
    made = LanguageModel(tiny_language_model(**options))
    return made.with_adapter(LoRAOptions(rank=2)) if adapter else made


def load(folder: Path) -> ScalarModel:
    return load_scalar_model(ModelSource(path=str(folder)), fresh_head=None, device=torch.device("cpu"))


@pytest.mark.parametrize("adapter", [False, True])
def test_there_is_one_backbone(adapter: bool) -> None:
    language = policy(adapter=adapter)
    value = scalar_on(language)
    own = {id(tensor) for tensor in value.model.parameters()} - {id(t) for t in language.model.parameters()}
    assert own == {id(value.model.get_submodule("score").weight)}
    assert is_on_trunk(value, language)
    assert not is_on_trunk(value, policy())


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen2", "gpt_neox"])
def test_it_scores_as_a_model_of_its_own_with_the_same_layers_and_head(architecture: str) -> None:
    language = LanguageModel(build_architecture(architecture))
    shared = scalar_on(language, HeadStart.NORMAL, seed=3)
    alone = scalar_from_language_model(language, HeadStart.NORMAL, seed=3)
    packed = pack(random_sequences(LENGTHS))
    with torch.no_grad():
        assert shared.token_scores(packed).equal(alone.token_scores(packed))


def test_what_is_trained_of_the_layers_stays_as_the_policy_has_it() -> None:
    language = policy(adapter=True)
    names = {name for name, _ in language.trainable_parameters()}
    value = scalar_on(language)
    assert names == {name for name, _ in language.trainable_parameters()}
    assert value.model.get_submodule("score").weight.requires_grad


def test_in_bf16_the_head_stays_in_float32() -> None:
    value = scalar_on(LanguageModel(tiny_language_model(), precision=Precision.BF16), HeadStart.NORMAL)
    assert value.precision is Precision.BF16
    with torch.no_grad():
        scores = value.token_scores(pack(random_sequences(LENGTHS)))
    assert scores.dtype is torch.float32
    assert not scores.equal(scores.to(torch.bfloat16).float())


def test_the_head_alone_is_saved_and_comes_back_bit_for_bit(tmp_path: Path) -> None:
    value = scalar_on(policy(), HeadStart.NORMAL, seed=1)
    save_head(value, tmp_path / "value")
    assert [file.name for file in (tmp_path / "value").iterdir()] == ["value_head.safetensors"]
    assert (tmp_path / "value" / "value_head.safetensors").stat().st_size < 500
    other = scalar_on(policy(), HeadStart.NORMAL, seed=2)
    load_head(other, tmp_path / "value")
    assert other.model.get_submodule("score").weight.equal(value.model.get_submodule("score").weight)
    with pytest.raises(CheckpointError, match="another width"):
        load_head(scalar_on(policy(hidden_size=32)), tmp_path / "value")
    with pytest.raises(CheckpointError, match="no value head"):
        load_head(other, tmp_path)


def test_a_head_is_taken_from_a_model_of_the_same_width_only() -> None:
    value = scalar_on(policy())
    trained = scalar_from_language_model(policy(seed=5), HeadStart.NORMAL, seed=4)
    copy_head(value, trained)
    assert value.model.get_submodule("score").weight.equal(trained.model.get_submodule("score").weight)
    with pytest.raises(ModelError, match="width 32 cannot be taken from one of width 16"):
        copy_head(scalar_on(policy(hidden_size=32)), trained)


@pytest.mark.parametrize("adapter", [False, True])
def test_the_saved_head_loads_as_a_model_of_its_own_with_the_policy_beside_it(adapter: bool, tmp_path: Path) -> None:
    save_pretrained(tiny_language_model(), tmp_path / "base")
    language = LanguageModel(type(tiny_language_model()).from_pretrained(tmp_path / "base"))
    if adapter:
        language = language.with_adapter(LoRAOptions(rank=2))
    value = scalar_on(language, HeadStart.NORMAL, seed=1)
    with torch.no_grad():
        for _, parameter in language.trainable_parameters():
            parameter.add_(0.02)
    save_pretrained(language.model, tmp_path / "policy")
    save_head(value, tmp_path / "value")
    loaded = load(tmp_path / "value")
    packed = pack(random_sequences(LENGTHS))
    with torch.no_grad():
        torch.testing.assert_close(loaded.token_scores(packed), value.token_scores(packed), rtol=0, atol=1e-5)
    assert not is_on_trunk(loaded, language)
    (tmp_path / "policy").rename(tmp_path / "moved")
    with pytest.raises(ModelError, match="layers are those of the policy of the run"):
        load(tmp_path / "value")


def test_models_that_share_some_tensors_are_refused() -> None:
    language = policy()
    value = scalar_from_language_model(language, HeadStart.ZERO)
    refuse_half_shared(value, language)
    value.base.base_model.embed_tokens.weight = language.base.base_model.embed_tokens.weight
    with pytest.raises(ModelError, match="shares 1 of its tensors"):
        refuse_half_shared(ScalarModel(value.model), language)
    refuse_half_shared(scalar_on(language), language)
