"""Gradients do not depend on how an update is cut, nor on what stands outside the mask. Policy and value alike."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import tiny_language_model
from proximo.config.ppo.options import PPOConfig
from proximo.learner.optimizers import OptimizerOptions
from proximo.learner.update import Learner
from proximo.models.language import LanguageModel
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.ppo.step import Roles, experience_of
from proximo.records import Experience, Passes
from records_made import prompt, response, scored
from roles_made import roles_of, state

LENGTHS = [(3, 5), (2, 1), (6, 9), (1, 4), (4, 7), (2, 3)]
"""Prompt and response tokens of each response."""


class Gathered(Learner):
    """Keeps the gradient of every update, and takes no step."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module, OptimizerOptions(learning_rate=1e-3), num_updates=10)
        self.gradients: list[dict[str, Tensor]] = []

    def _apply(self, norm: float) -> None:
        self.gradients.append({name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None})


def config(**options) -> PPOConfig:
    base = {"prompts_per_step": 6, "epochs_per_step": 1, "minibatch_responses": 6, "kl": "none"}
    return PPOConfig(**(base | options))


def models(dtype: torch.dtype) -> tuple[LanguageModel, ScalarModel]:
    policy = LanguageModel(tiny_language_model(dtype=dtype))
    return policy, scalar_from_language_model(policy, HeadStart.NORMAL, seed=1)


def make(policy: LanguageModel, value: ScalarModel, options: PPOConfig) -> tuple[Roles, Experience]:
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 60, (count,), generator=generator).tolist()

    batch = [
        scored(float(i % 3), of=response(ids(n), to=prompt(str(i), token_ids=ids(p))))
        for i, (p, n) in enumerate(LENGTHS)
    ]
    roles = roles_of(options, policy, value=value, reference=policy)
    responses = [s.response for s in batch]
    old, values = roles.policy.logprobs(responses), roles.value.values(responses)
    noise = 0.3 * torch.randn(old.shape, generator=generator, dtype=old.dtype)
    passes = Passes(old_logprobs=old + noise, reference_logprobs=old - 0.1, values=values)
    return roles, experience_of(batch, passes, state(0.1), config=options)[0]


def gradients(role: str, dtype: torch.dtype = torch.float64, poison: bool = False, **options) -> dict[str, Tensor]:
    """The gradient of one update of one role."""
    policy, value = models(dtype)
    roles, experience = make(policy, value, config(**options))
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
    worker = roles.policy if role == "policy" else roles.value
    worker.learner = learner = Gathered(worker.model.model)
    worker.train(experience, state(0.1))
    (gathered,) = learner.gradients
    return gathered


def worst_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[n] - second[n]).norm() / (first[n].norm() + 1e-300)) for n in first if first[n].norm() > 0)


WIDE = {"clip_low": 0.5, "clip_high": 0.5}
OBJECTIVES = [
    {"objective": "ppo"},
    {"objective": {"kind": "ppo", "dual_clip": 1.05}},
    {"objective": {"kind": "gspo", **WIDE}},
    {"objective": "cispo"},
    {"objective": "sapo"},
    {"objective": {"kind": "m2po", "max_second_moment": 0.03}},
    {"entropy_coefficient": 0.3},
    {"behaviour_weight": "truncated"},
    {"behaviour_weight": {"kind": "masked", "cap": 1.0}},
    {"behaviour_weight": {"kind": "truncated", "cap": None, "of": "geometric_mean"}},
    *(
        {"rejection": {"kind": "ratio", "over": over, "lower": 0.0365, "upper": 1.4, "denominator": denominator}}
        for over in ("token", "geometric_mean")
        for denominator in ("kept", "all")
    ),
]
AVERAGES = ("token_mean", "response_mean", "constant")
KLS = ({"kind": "loss", "estimator": "k2"}, {"kind": "none"}, {"kind": "loss", "estimator": "weighted_k3"})
CUT = [
    *(({"aggregation": average}, kl) for average, kl in zip(AVERAGES, KLS, strict=True)),
    *((loss | {"aggregation": AVERAGES[n % 3]}, KLS[n // 3 % 3]) for n, loss in enumerate(OBJECTIVES)),
]
"""Every objective, average and KL."""


@pytest.mark.parametrize(("loss", "kl"), CUT, ids=lambda each: "-".join(map(str, each.values())))
def test_the_policy_gradient_does_not_depend_on_the_micro_batches(loss: dict, kl: dict) -> None:
    whole = gradients("policy", policy_loss=loss, kl=kl)
    for budget in (1, 17):
        cut = gradients("policy", tokens_per_microbatch=budget, policy_loss=loss, kl=kl)
        assert worst_difference(whole, cut) < 1e-10


@pytest.mark.parametrize("budget", [1, 8192])
def test_m2po_leaves_out_the_tokens_of_the_whole_minibatch_that_are_furthest_from_the_old_policy(budget: int) -> None:
    """Counted down from the largest square, one at a time, until the mean of the rest is within the limit."""
    policy, value = models(torch.float64)
    loss = {"objective": {"kind": "m2po", "max_second_moment": 0.03}}
    roles, experience = make(policy, value, config(policy_loss=loss, tokens_per_microbatch=budget))
    now = roles.policy.logprobs([each.response for each in experience.scored])
    squares = sorted((now - experience.old_logprobs).square().tolist(), reverse=True)
    left_out = next(n for n in range(len(squares)) if sum(squares[n:]) / len(squares[n:]) <= 0.03)
    assert 0 < left_out < len(squares)
    report = roles.policy.train(experience, state())
    assert report.metrics["policy/clip_fraction"].value == pytest.approx(left_out / len(squares))
    nothing = gradients("policy", policy_loss={"objective": {"kind": "m2po", "max_second_moment": 1e-12}})
    assert all(not gradient.any() for gradient in nothing.values())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_entropy_bonus_is_the_entropy_of_the_next_token_at_the_temperature(temperature: float) -> None:
    """From the logits of transformers' own forward, response by response."""
    rollout = {"temperature": temperature}
    _, experience = make(*models(torch.float64), config(rollout=rollout))
    model = tiny_language_model(dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for scored_ in experience.scored:
        asked, written = scored_.response.prompt.token_ids, scored_.response.token_ids
        logits = model(input_ids=torch.tensor([[*asked, *written]])).logits[0, len(asked) - 1 : -1]
        total = total + torch.distributions.Categorical(logits=logits / temperature).entropy().sum()
    (total / 29).backward()
    entropy = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    plain = gradients("policy", rollout=rollout)
    bonus = gradients("policy", rollout=rollout, policy_loss={"entropy_coefficient": 100.0})
    found = {name: (plain[name] - bonus[name]) / 100 for name in plain}
    assert worst_difference(entropy, found) < 1e-5


@pytest.mark.parametrize("budget", [1, 17, 30])
@pytest.mark.parametrize("error", ["squared", {"kind": "huber", "delta": 0.2}, "smooth_l1"])
def test_the_value_gradient_does_not_depend_on_the_micro_batches(budget: int, error: Any) -> None:
    options = {"value_loss": {"error": error}}
    whole = gradients("value", **options)
    assert worst_difference(whole, gradients("value", **options, tokens_per_microbatch=budget)) < 1e-10
    assert (worst_difference(whole, gradients("value")) > 1e-3) == (error != "squared")


@pytest.mark.parametrize("role", ["policy", "value"])
def test_in_float32_the_micro_batches_change_the_gradient_by_rounding_only(role: str) -> None:
    whole = gradients(role, torch.float32)
    assert worst_difference(whole, gradients(role, torch.float32, tokens_per_microbatch=9)) < 1e-5


def test_what_stands_outside_the_mask_reaches_no_gradient() -> None:
    every = [("value", {}), *(("policy", {**loss, "aggregation": "response_mean"}) for loss in ({}, *OBJECTIVES))]
    for role, loss in every:
        found = gradients(role, poison=True, policy_loss=loss)
        assert all(gradient.isfinite().all() for gradient in found.values()), loss


@pytest.mark.parametrize(("target", "ends"), [(0.0498, True), (0.0499, False)])
def test_the_target_kl_is_held_against_k3_where_the_mean_log_ratio_is_negative(target: float, ends: bool) -> None:
    """All tokens became likelier by 0.3 nats: old - new is -0.3, k3 is exp(0.3) - 1 - 0.3 = 0.04986."""
    policy, value = models(torch.float64)
    roles, experience = make(policy, value, config(minibatch_responses=2, guards={"target_kl": target}))
    old = roles.policy.logprobs([s.response for s in experience.scored])
    roles.policy.learner = learner = Gathered(policy.model)
    report = roles.policy.train(replace(experience, old_logprobs=old - 0.3), state())
    assert len(learner.gradients) == (0 if ends else 3)
    assert report.metrics["policy/stopped_updates"].value == (3 if ends else 0)
    assert report.metrics["policy/skipped_updates"].value == 0
    assert report.share_trained == (1 / 3 if ends else 1)
    assert [("target_kl" in reason) for reason in report.refusals] == ([True] if ends else [])


def test_the_mean_of_the_losses_of_updates_weighs_what_each_is_the_mean_over() -> None:
    """Minibatches of four and of two responses, of which each has its own loss."""
    for aggregation in ("token_mean", "response_mean"):
        policy, value = models(torch.float64)
        of_both = {"policy_loss": {"aggregation": aggregation}}
        roles, experience = make(policy, value, config(minibatch_responses=4, **of_both))
        losses = []
        for each in (roles, roles_of(config(**of_both), policy)):
            each.policy.learner = Gathered(policy.model)
            report = each.policy.train(experience, state())
            losses.append(report.metrics["policy/loss"].value)
        assert losses[0] == pytest.approx(losses[1], rel=1e-10)
