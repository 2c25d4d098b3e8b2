"""Frozen layers are the lowest ones, stay as they are to the bit, and cost no optimizer state."""

import pytest
import torch

from builders import tiny_language_model
from proximo.errors import ModelError
from proximo.learner.optimizers import OptimizerOptions
from proximo.learner.update import Learner
from proximo.models.language import LanguageModel
from proximo.models.packing import pack_responses
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.models.transformers_model import freeze_layers


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_neox", "opt"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_step_moves_the_upper_layers_only(model_type: str, tied: bool) -> None:
    shapes = {"gpt2": {"n_embd": 16, "n_head": 2, "n_layer": 3}}
    shape = shapes.get(model_type, {"num_hidden_layers": 3})
    model = LanguageModel(tiny_language_model(model_type, tie_word_embeddings=tied, **shape))
    freeze_layers(model.base, 2)
    before = {name: parameter.detach().clone() for name, parameter in model.model.named_parameters()}
    learner = Learner(model.model, OptimizerOptions(learning_rate=1e-2), num_updates=1)
    batch = pack_responses([[3, 4, 5]], [[6, 7, 8]])
    learner.update([batch], lambda given: (-model.response_logprobs(given).logprobs.sum(), 0))
    moved = {name for name, parameter in model.model.named_parameters() if not torch.equal(parameter, before[name])}
    layers = {name for name in before if any(f".{index}." in name for index in range(3))}
    assert {name for name in layers if ".2." in name} <= moved
    assert not {name for name in layers if ".2." not in name} & moved
    embeddings = model.base.get_input_embeddings().weight
    assert embeddings.requires_grad == (model.base.get_output_embeddings().weight is embeddings)
    assert moved == set(learner.parameters)


def test_a_frozen_copy_shares_the_layers_that_do_not_train() -> None:
    """The layers that TRL's reference should share with its policy."""
    model = LanguageModel(tiny_language_model(num_hidden_layers=3))
    freeze_layers(model.base, 2)
    trained = {name for name, _ in model.trainable_parameters()}
    reference = model.frozen_copy()
    copied = dict(reference.model.named_parameters())
    assert {name for name, each in model.model.named_parameters() if copied[name] is not each} == trained
    assert not any(each.requires_grad for each in copied.values())
    assert {name for name, _ in model.trainable_parameters()} == trained


def test_a_scalar_model_has_frozen_layers_too() -> None:
    scalar = scalar_from_language_model(LanguageModel(tiny_language_model()), HeadStart.NORMAL)
    freeze_layers(scalar.base, 1)
    trained = {name for name, _ in scalar.trainable_parameters()}
    assert any("layers.1" in name for name in trained)
    assert any("score" in name for name in trained)
    assert not any("layers.0" in name or "embed" in name for name in trained)


def test_more_layers_than_there_are_is_an_error_and_none_changes_nothing() -> None:
    model = tiny_language_model()
    freeze_layers(model, 0)
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ModelError, match="frozen_layers is 3, but the llama model has 2 layers"):
        freeze_layers(model, 3)
