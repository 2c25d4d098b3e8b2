"""What an optimizer step is made of: which tensors decay, which rate holds, how large the gradient is."""

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


def test_every_trainable_tensor_is_in_one_group_and_no_group_is_empty() -> None:
    every = trainable_parameters(Network())
    assert set(every) == {*MATRICES, *OTHERS}
    for names, num_groups in ((every, 2), (MATRICES, 1), (OTHERS, 1)):
        parameters = {name: tensor for name, tensor in every.items() if name in names}
        groups = make_optimizer(parameters, OptimizerOptions(learning_rate=0.1)).param_groups
        assert len(groups) == num_groups
        held = [id(parameter) for group in groups for parameter in group["params"]]
        assert sorted(held) == sorted(id(parameter) for parameter in parameters.values())


def test_the_norm_is_over_all_gradients_together_and_0_where_there_is_none() -> None:
    parameters = {name: nn.Parameter(torch.zeros(2)) for name in "abc"}
    assert float(gradient_norm(parameters)) == 0
    parameters["a"].grad = torch.tensor([1.0, 2.0])
    parameters["c"].grad = torch.tensor([2.0, 4.0])
    assert float(gradient_norm(parameters)) == pytest.approx(5.0)
