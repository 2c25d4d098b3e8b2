"""Gradients do not depend on how an update is cut, nor on what stands outside the mask. Policy and value alike."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from builders import tiny_language_model
from proximo.config.ppo import PPOConfig
from proximo.learner.optimizer import OptimizerOptions
from proximo.learner.update import Learner
from proximo.models.language import LanguageModel
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.records import Experience
from proximo.trainers.calls import InferenceCalls, Roles
from proximo.trainers.experience import Passes, make_experience
from proximo.trainers.updates import UpdateCalls
from records_made import prompt, response, scored

LENGTHS = [(3, 5), (2, 1), (6, 9), (1, 4), (4, 7), (2, 3)]
"""Prompt and response tokens of each response."""


class Gathered(Learner):
    """Keeps the gradient of every update, and takes no step."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module, OptimizerOptions(learning_rate=1e-3), num_updates=10)
        self.gradients: list[dict[str, Tensor]] = []

    def _apply(self, norm: float, learning_rate: float) -> None:
        self.gradients.append({name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None})


def config(**options) -> PPOConfig:
    base = {"prompts_per_step": 6, "epochs_per_step": 1, "minibatch_responses": 6, "kl": {"place": "none"}}
    return PPOConfig(**(base | options))


def models(dtype: torch.dtype) -> tuple[LanguageModel, ScalarModel]:
    policy = LanguageModel(tiny_language_model(dtype=dtype))
    return policy, scalar_from_language_model(policy, HeadStart.NORMAL, seed=1)


def make(policy: LanguageModel, value: ScalarModel, options: PPOConfig) -> tuple[InferenceCalls, Experience]:
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 60, (count,), generator=generator).tolist()

    batch = [
        scored(float(i % 3), of=response(ids(n), to=prompt(str(i), token_ids=ids(p))))
        for i, (p, n) in enumerate(LENGTHS)
    ]
    calls = InferenceCalls(Roles(policy=policy, reference=policy, value=value, engine=None), None, options)  # type: ignore[arg-type]
    responses = [s.response for s in batch]
    (old,), (values,) = calls.policy_logprobs(responses), calls.values(responses)
    noise = 0.3 * torch.randn(old.shape, generator=generator, dtype=old.dtype)
    passes = Passes(old_logprobs=old + noise, reference_logprobs=old - 0.1, values=values)
    return calls, make_experience(batch, passes, config=options, kl_coefficient=0.1)[0]


def gradients(role: str, dtype: torch.dtype = torch.float64, poison: bool = False, **options) -> dict[str, Tensor]:
    """The gradient of one update of one role."""
    policy, value = models(dtype)
    calls, experience = make(policy, value, config(**options))
    if poison:
        mask = experience.mask.clone()
        mask[:5] = False
        bad = torch.where(mask, 0.0, torch.nan).to(dtype)
        experience = replace(
            experience,
            mask=mask,
            old_logprobs=experience.old_logprobs + bad,
            advantages=experience.advantages + bad,
            returns=experience.returns + bad,
        )
    learners = {"policy": Gathered(policy.model), "value": Gathered(value.model)}
    updates = UpdateCalls(calls, policy=learners["policy"], value=learners["value"], seed=0)
    if role == "policy":
        updates.train_policy(experience, kl_coefficient=0.1, step=0)
    else:
        updates.train_value(experience, step=0)
    (gathered,) = learners[role].gradients
    return gathered


def worst_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[n] - second[n]).norm() / (first[n].norm() + 1e-300)) for n in first if first[n].norm() > 0)


@pytest.mark.parametrize(
    "kl", [{"place": "none"}, {"place": "loss", "measure": "k2"}, {"place": "loss", "measure": "weighted_k3"}]
)
@pytest.mark.parametrize("budget", [1, 17, 30])
def test_the_policy_gradient_does_not_depend_on_the_micro_batches(budget: int, kl: dict) -> None:
    whole = gradients("policy", kl=kl)
    assert worst_difference(whole, gradients("policy", kl=kl, tokens_per_microbatch=budget)) < 1e-10


@pytest.mark.parametrize("budget", [1, 17, 30])
def test_the_value_gradient_does_not_depend_on_the_micro_batches(budget: int) -> None:
    assert worst_difference(gradients("value"), gradients("value", tokens_per_microbatch=budget)) < 1e-10


@pytest.mark.parametrize("role", ["policy", "value"])
def test_in_float32_the_micro_batches_change_the_gradient_by_rounding_only(role: str) -> None:
    whole = gradients(role, torch.float32)
    assert worst_difference(whole, gradients(role, torch.float32, tokens_per_microbatch=9)) < 1e-5


@pytest.mark.parametrize("role", ["policy", "value"])
def test_what_stands_outside_the_mask_reaches_no_gradient(role: str) -> None:
    assert all(gradient.isfinite().all() for gradient in gradients(role, poison=True).values())


def test_the_kl_in_the_loss_changes_the_gradient() -> None:
    plain = gradients("policy")
    for measure in ("k2", "weighted_k3"):
        assert worst_difference(plain, gradients("policy", kl={"place": "loss", "measure": measure})) > 1e-3


def test_every_trainable_tensor_of_both_models_gets_a_gradient() -> None:
    for role in ("policy", "value"):
        policy, value = models(torch.float64)
        names = {name for name, _ in (policy if role == "policy" else value).trainable_parameters()}
        found = gradients(role)
        assert names == {name for name, gradient in found.items() if gradient.abs().sum() > 0}


def test_a_minibatch_beyond_its_limit_is_skipped_before_the_optimizer_sees_it() -> None:
    policy, value = models(torch.float64)
    calls, experience = make(policy, value, config(guards={"max_ratio": 1.0001, "max_skipped_fraction": 1.0}))
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    learner = Learner(policy.model, OptimizerOptions(learning_rate=1e-2, weight_decay=0.1), num_updates=4)
    report = UpdateCalls(calls, policy=learner, value=None, seed=0).train_policy(experience, kl_coefficient=0.0, step=0)
    assert "max_ratio" in report.refusals[0]
    assert report.metrics["policy/skipped_updates"].value == 1
    assert learner.updates_done == 0
    assert not learner.optimizer.state
    assert all(torch.equal(before[name], p) for name, p in policy.model.named_parameters())
