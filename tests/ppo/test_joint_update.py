"""The gradient of a joint update on a shared trunk: the sum of those that policy and value model have alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from builders import tiny_language_model
from ppo.test_updates import LENGTHS, Gathered, worst_difference
from proximo.config.ppo.options import PPOConfig
from proximo.learner.optimizers import OptimizerOptions
from proximo.learner.update import Learner
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.models.sharing import is_on_trunk, scalar_on
from proximo.ppo.roles.build import Roles, make_learners
from proximo.ppo.step import experience_of
from proximo.ppo.update.epochs import Report
from proximo.records import Experience, Passes
from records_made import drawn
from roles_made import roles_of, state


def weights(module: torch.nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def moved(before: list[Tensor], module: torch.nn.Module) -> list[bool]:
    return [not old.equal(new) for old, new in zip(before, module.parameters(), strict=True)]


def language_model(*, adapter: bool = False) -> LanguageModel:
    """GPT-2 in float64: the norm of Llama takes gradients through float32."""
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    policy = LanguageModel(tiny_language_model("gpt2", dtype=torch.float64, **shape))
    return policy.with_adapter(LoRAOptions(rank=2)) if adapter else policy


def updates_of(policy: LanguageModel, value: ScalarModel, **options: Any) -> tuple[Roles, Experience]:
    base = {"prompts_per_step": 6, "epochs_per_step": 1, "minibatch_responses": 6, "kl": "none"}
    config = PPOConfig(**(base | options))
    shares_trunk = is_on_trunk(value, policy)
    module, head = make_learners(policy, value, config, shares_trunk=shares_trunk)
    learners = {"policy": Gathered(module.module)} | ({} if head is None else {"value": head})
    roles, draw = roles_of(config, policy, value=value, learners=learners), torch.Generator().manual_seed(0)
    batch = drawn(LENGTHS)
    responses = [each.response for each in batch]
    old, values = roles.policy.logprobs(responses), roles.value.values(responses)
    noise = 0.3 * torch.randn(old.shape, generator=draw, dtype=old.dtype)
    passes = Passes(old_logprobs=old + noise, reference_logprobs=old - 0.1, values=values)
    experience, _, _ = experience_of(batch, passes, state(0.1), config=config)
    return roles, experience


def joint(*, adapter: bool = False, **options: Any) -> tuple[dict[str, Tensor], tuple[Report, Report]]:
    """The gradient of one joint update, and the reports of both parts."""
    policy = language_model(adapter=adapter)
    roles, experience = updates_of(policy, scalar_on(policy, HeadStart.NORMAL, seed=1), **options)
    assert roles.value is not None
    reports = roles.policy.train_with_value(experience, state(0.1), roles.value)
    (gathered,) = roles.policy.learner.gradients  # type: ignore[attr-defined]
    return {name.removeprefix("policy."): gradient for name, gradient in gathered.items()}, reports


def separate(role: str, **options: Any) -> tuple[dict[str, Tensor], Report]:
    """The gradient of one model of its own, with the same weights."""
    policy = language_model()
    value = scalar_from_language_model(policy, HeadStart.NORMAL, seed=1)
    roles, experience = updates_of(policy, value, **options)
    if role == "policy":
        report = roles.policy.train(experience, state(0.1))
        (gathered,) = roles.policy.learner.gradients  # type: ignore[attr-defined]
        return gathered, report
    roles.value.learner = learner = Gathered(value.model)
    report = roles.value.train(experience, state())
    (gathered,) = learner.gradients
    return {name.replace("score.", "head."): gradient for name, gradient in gathered.items()}, report


OPTIONS: list[dict[str, Any]] = [
    {},
    {"policy_loss": {"aggregation": "response_mean", "entropy_coefficient": 0.3}, "rollout": {"temperature": 0.6}},
    {
        "kl": {"kind": "loss", "estimator": "k2"},
        "policy_loss": {"objective": {"kind": "gspo", "clip_low": 0.5, "clip_high": 0.5}},
    },
    {"value_loss": {"error": {"kind": "huber", "delta": 0.2}, "normalise": "cumulative"}},
]


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_the_joint_gradient_is_the_sum_of_the_two_and_does_not_depend_on_the_micro_batches(options: dict) -> None:
    (of_policy, alone), (of_value, alone_value) = separate("policy", **options), separate("value", **options)
    loss = options.get("value_loss", {})
    for coefficient, weight in ((None, 0.1), (0.7, 0.7)):
        found, (report, value_report) = joint(**options | {"value_loss": {**loss, "coefficient": coefficient}})
        names = of_policy.keys() | of_value.keys()
        assert found.keys() == names
        wanted = {n: of_policy.get(n, torch.zeros(())) + weight * of_value.get(n, torch.zeros(())) for n in names}
        assert worst_difference(wanted, found) < 1e-10
    for budget in (1, 17):
        cut, _ = joint(**options | {"value_loss": {**loss, "coefficient": 0.7}, "tokens_per_microbatch": budget})
        assert worst_difference(found, cut) < 1e-10
    for name in ("policy/loss", "policy/clip_fraction", "policy/approx_kl"):
        assert report.metrics[name].value == pytest.approx(alone.metrics[name].value, rel=1e-9)
    for name in {"value/loss", "value/clip_fraction", "value/scale"} & set(alone_value.metrics):
        assert value_report.metrics[name].value == pytest.approx(alone_value.metrics[name].value, rel=1e-9)


def test_the_gradient_of_an_adapter_is_that_of_both_losses_and_the_base_gets_none() -> None:
    one, _ = joint(adapter=True, value_loss={"coefficient": 1e-12})
    other, _ = joint(adapter=True, value_loss={"coefficient": 1.0})
    assert all("lora_" in name or name == "head.weight" for name in one)
    assert worst_difference(one, other) > 1e-2


@pytest.mark.parametrize("guard", [{"max_ratio": 1.0 + 1e-9}, {"target_kl": 1e-12}], ids=["skips", "ends"])
def test_an_update_that_is_refused_leaves_both_where_they_were(guard: dict[str, float]) -> None:
    policy = language_model()
    value = scalar_on(policy, HeadStart.NORMAL, seed=1)
    roles, experience = updates_of(policy, value, guards={**guard, "max_skipped_fraction": 1.0})
    assert roles.value is not None
    module = roles.policy.learner.module
    roles.policy.learner = Learner(module, OptimizerOptions(learning_rate=1e-2, weight_decay=0.1), num_updates=4)
    before = weights(module)
    report, _ = roles.policy.train_with_value(experience, state(), roles.value)
    assert next(iter(guard)) in report.refusals[0]
    assert not any(moved(before, module))
    assert not roles.policy.learner.optimizer.state
