"""Stepping weights within the backward pass: the same weights as the ordinary way, and one gradient at a time."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from builders import tiny_language_model
from proximo.errors import TrainingError
from proximo.learner.optimizers import OptimizerOptions
from proximo.learner.update import Learner
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.packing import PackedResponses, pack_responses
from proximo.models.precision.placement import Precision

PROMPTS = [(5, 6, 7), (8, 9)]
RESPONSES = [(10, 11), (12, 13, 14, 2)]
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def language_model(case: str) -> LanguageModel:
    kind = "gpt2" if "tied embeddings" in case else "llama"
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, **NO_DROPOUT} if kind == "gpt2" else {}
    precision = Precision.BF16 if case.startswith("bf16") else Precision.FLOAT32
    model = LanguageModel(tiny_language_model(kind, **sizes), precision=precision)
    if case == "adapter":
        model = model.with_adapter(LoRAOptions(rank=2, alpha=4))
    if "activation checkpointing" in case:
        model.use_activation_checkpointing()
    return model


def batch() -> PackedResponses:
    return pack_responses(PROMPTS, RESPONSES, device=torch.device("cpu"))


def negative_log_likelihood(model: LanguageModel) -> Callable[[PackedResponses], tuple[Tensor, None]]:
    return lambda packed: (-model.response_logprobs(packed).logprobs.mean(), None)


def learner(model: LanguageModel, **options) -> Learner:
    given = {"learning_rate": 0.05, "max_gradient_norm": None, "weight_decay": 0.1, "schedule": "cosine"} | options
    return Learner(model.model, OptimizerOptions(**given), num_updates=6)


def weights(made: Learner) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in made.parameters.items()}


BF16 = ["bf16", "bf16, tied embeddings", "bf16, activation checkpointing"]


@pytest.mark.parametrize("case", ["plain", "tied embeddings", "adapter", "activation checkpointing", *BF16])
def test_the_weights_are_those_of_the_ordinary_way_bit_for_bit(case: str) -> None:
    ordinary, early = learner(language_model(case)), learner(language_model(case), in_backward=True)
    start = weights(ordinary)
    results = []
    for made in (ordinary, early):
        model = LanguageModel(made.module, precision=Precision.BF16 if case in BF16 else Precision.FLOAT32)
        results.append([made.update([batch()], negative_log_likelihood(model)) for _ in range(4)])
    for name, tensor in weights(ordinary).items():
        assert torch.equal(tensor, weights(early)[name]), name
        assert not torch.equal(tensor, start[name]), name
    assert early.updates_done == 4
    for one, other in zip(*results, strict=True):
        assert (one.loss, one.learning_rate) == (other.loss, other.learning_rate)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-6)


@pytest.mark.parametrize("in_backward", [False, True])
def test_one_gradient_exists_at_a_time(in_backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = learner(language_model("plain"), in_backward=in_backward)
    alive = []
    really = made.optimizer.step

    def step() -> None:
        alive.append(sum(parameter.grad is not None for parameter in made.parameters.values()))
        really()

    monkeypatch.setattr(made.optimizer, "step", step)
    made.update([batch()], negative_log_likelihood(LanguageModel(made.module)))
    assert alive == ([1] * len(made.parameters) if in_backward else [len(made.parameters)])
    assert all(parameter.grad is None for parameter in made.parameters.values())


def test_a_backward_pass_outside_an_update_steps_nothing() -> None:
    made = learner(language_model("plain"), in_backward=True)
    loss = negative_log_likelihood(LanguageModel(made.module))
    made.update([batch()], loss)
    before = weights(made)
    loss(batch())[0].backward()
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(made).items())
    assert all(parameter.grad is not None for parameter in made.parameters.values())


def refused(made: Learner, **given) -> str | None:
    """Why an update was refused that left weights, optimizer and count as they were."""
    before = weights(made)
    result = made.update([batch()], **given)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(made).items())
    assert not made.optimizer.state
    assert made.updates_done == 0
    assert not any(module.training for module in made.module.modules())
    return result.refusal


def test_what_is_known_before_the_backward_pass_skips_the_update() -> None:
    made = learner(language_model("plain"), in_backward=True)
    loss = negative_log_likelihood(LanguageModel(made.module))
    assert refused(made, loss=lambda rows: (loss(rows)[0] * torch.inf, None)) == "the loss is inf"
    assert refused(made, loss=loss, guard=lambda parts: f"{len(parts)} part is wrong") == "1 part is wrong"


def test_several_micro_batches_are_refused_before_anything_is_done() -> None:
    made = learner(language_model("plain"), in_backward=True)
    before = weights(made)
    with pytest.raises(TrainingError, match=r"cut into 2 micro-batches.*raise tokens_per_microbatch"):
        made.update([batch(), batch()], negative_log_likelihood(LanguageModel(made.module)))
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(made).items())
    assert not made.optimizer.state


def infinite_slope(model: LanguageModel) -> Callable[[PackedResponses], tuple[Tensor, None]]:
    """The square root has a finite value at 0 and an infinite slope."""
    return lambda packed: ((model.response_logprobs(packed).logprobs * 0).abs().sqrt().sum(), None)


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_gradient_that_is_not_finite_can_stop_the_run(in_backward: bool) -> None:
    made = learner(language_model("plain"), in_backward=in_backward, non_finite_gradient="stop")
    before = weights(made)
    with pytest.raises(TrainingError, match="update 1: the gradient norm is nan") as error:
        made.update([batch()], infinite_slope(LanguageModel(made.module)))
    assert ("the weights have moved" in str(error.value)) == in_backward
    assert in_backward or all(torch.equal(before[name], tensor) for name, tensor in weights(made).items())
