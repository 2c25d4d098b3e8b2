"""What an optimizer step is made of: which tensors decay, which rate holds, how large the gradient is."""

import math

import pytest
import torch
from torch import nn

from builders import tiny_language_model
from proximo.learner.optimizers import (
    OptimizerOptions,
    make_optimizer,
    trainable_parameters,
)
from proximo.learner.update import gradient_norm
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.scalar import HeadStart, scalar_from_language_model


class Network(nn.Module):
    """Matrices, a bias, a norm, a scalar and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Linear(3, 2).requires_grad_(False)


MATRICES = ("embedding.weight", "linear.weight")
OTHERS = ("linear.bias", "norm.weight", "norm.bias", "scale")


def test_frozen_tensors_are_not_trained_and_names_are_those_of_the_model() -> None:
    found = trainable_parameters(Network())
    assert set(found) == {*MATRICES, *OTHERS}


def test_matrices_decay_and_biases_norms_and_scalars_do_not() -> None:
    """With gradients of exactly 0 a step of AdamW is its decay: a factor of 1 - rate * decay."""
    network = Network()
    parameters = trainable_parameters(network)
    for parameter in parameters.values():
        nn.init.constant_(parameter, 1.5)
        parameter.grad = torch.zeros_like(parameter)
    make_optimizer(parameters, OptimizerOptions(learning_rate=0.1, weight_decay=0.5)).step()
    for name in MATRICES:
        torch.testing.assert_close(parameters[name].detach(), torch.full_like(parameters[name], 1.5 * 0.95))
    for name in OTHERS:
        assert torch.equal(parameters[name].detach(), torch.full_like(parameters[name], 1.5)), name


def decaying(model: nn.Module) -> set[str]:
    parameters = trainable_parameters(model)
    groups = make_optimizer(parameters, OptimizerOptions(learning_rate=0.1, weight_decay=0.5)).param_groups
    held = {id(parameter) for group in groups if group["weight_decay"] > 0 for parameter in group["params"]}
    return {name for name, parameter in parameters.items() if id(parameter) in held}


def test_which_tensors_of_real_models_decay() -> None:
    """Both matrices of an adapter, embeddings and heads; of GPT-2 no bias and no norm."""
    adapted = LanguageModel(tiny_language_model(num_hidden_layers=1)).with_adapter(LoRAOptions(rank=2, alpha=4))
    assert decaying(adapted.model) == set(trainable_parameters(adapted.model))
    assert {name.rsplit(".", 2)[0][-6:] for name in decaying(adapted.model)} == {"lora_A", "lora_B"}
    gpt2 = LanguageModel(tiny_language_model("gpt2", num_hidden_layers=1))
    value = scalar_from_language_model(gpt2, HeadStart.ZERO)
    matrices = {f"transformer.h.0.{part}.weight" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    assert decaying(value.model) == {*matrices, "transformer.wte.weight", "transformer.wpe.weight", "score.weight"}


def test_every_trainable_tensor_is_in_exactly_one_group() -> None:
    parameters = trainable_parameters(Network())
    optimizer = make_optimizer(parameters, OptimizerOptions(learning_rate=0.1))
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in parameters.values())


@pytest.mark.parametrize("names", [MATRICES, OTHERS])
def test_a_model_of_one_kind_of_tensor_has_no_empty_group(names: tuple[str, ...]) -> None:
    parameters = {name: tensor for name, tensor in trainable_parameters(Network()).items() if name in names}
    assert len(make_optimizer(parameters, OptimizerOptions(learning_rate=0.1)).param_groups) == 1


def test_the_first_step_is_that_of_the_paper() -> None:
    """Moments after one step, bias-corrected: g and g^2, so the move is rate * g / (|g| + eps)."""
    weight = nn.Parameter(torch.tensor([1.0, 1.0]))
    weight.grad = torch.tensor([0.5, -2.0])
    options = OptimizerOptions(learning_rate=0.1, eps=0.5)
    optimizer = make_optimizer({"weight": weight}, options)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([1 - 0.1 * 0.5 / 1.0, 1 + 0.1 * 2.0 / 2.5]))
    moments = optimizer.state[weight]
    torch.testing.assert_close(moments["exp_avg"], 0.1 * weight.grad)
    torch.testing.assert_close(moments["exp_avg_sq"], 0.05 * weight.grad.square())


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [1 / 3, 2 / 3, 1.0, 0.8, 0.6, 0.4]),
        ("cosine", [1 / 3, 2 / 3, 1.0, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2 + 0.4 * (1 - math.sqrt(0.5))]),
    ],
)
def test_the_rate_is_a_function_of_the_update(schedule: str, rates: list[float]) -> None:
    options = OptimizerOptions(learning_rate=0.01, schedule=schedule, warmup_updates=2, final_fraction=0.2)
    found = [options.rate_factor(update=update, num_updates=6) for update in range(6)]
    assert found == pytest.approx(rates)


def test_the_norm_is_over_all_gradients_together_and_0_where_there_is_none() -> None:
    parameters = {name: nn.Parameter(torch.zeros(2)) for name in "abc"}
    assert float(gradient_norm(parameters)) == 0
    parameters["a"].grad = torch.tensor([1.0, 2.0])
    parameters["c"].grad = torch.tensor([2.0, 4.0])
    assert float(gradient_norm(parameters)) == pytest.approx(5.0)
