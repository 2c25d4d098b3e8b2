"""Policy and value head on one trunk: one pass, one loss, one update; each part as if it were alone."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import mean
from typing import Any

import pytest
import torch

from builders import tiny_language_model, tiny_tokenizer
from ppo.test_joint_update import moved, weights
from ppo_trainers import PROMPTS, count_a_and_letters, ppo_trainer
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ConfigError
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.precision.placement import Precision
from proximo.models.scalar import HeadStart
from proximo.models.sharing import scalar_on
from proximo.ppo.step import trace_step
from proximo.ppo.trainer import PPOTrainer

trainer = partial(ppo_trainer, value="trunk", num_steps=3, epochs_per_step=2, minibatch_responses=2)


def head_of(made: PPOTrainer) -> torch.nn.Module:
    return made.roles.value.model.base.get_submodule("score")


def passes_of_a_step(made: PPOTrainer) -> int:
    """Through the layers of the policy, in everything but the sampling."""
    responses, counted = made.generate(PROMPTS), []
    hook = made.policy.backbone.layers.register_forward_hook(lambda *_: counted.append(1))
    made.step(PROMPTS, responses, [1.0, 2.0, 0.0, 5.0])
    hook.remove()
    return len(counted)


@pytest.mark.parametrize(
    ("options", "shared", "alone"),
    [
        ({}, 1 + 4, 4),
        ({"rollout": {"max_new_tokens": 6, "min_new_tokens": 1}}, 1 + 4, 1 + 4),
        ({"critic_warmup_steps": 1}, 5, 0),
    ],
    ids=["values alone", "log-probs and values", "warm-up"],
)
def test_one_pass_serves_both(options: dict, shared: int, alone: int) -> None:
    """Two epochs of two minibatches, and the pass before them; the reference is a model of its own."""
    assert passes_of_a_step(trainer(**options)) == shared
    assert passes_of_a_step(trainer(value=None, **options)) == alone


def test_the_one_pass_gives_what_the_two_calls_give() -> None:
    made = trainer(value_loss={"normalise": "cumulative"})
    made.train(PROMPTS, reward=count_a_and_letters)
    roles = made.roles
    nothing = {"token_ids": (), "logprobs": torch.empty(0), "response_mask": torch.empty(0, dtype=torch.bool)}
    responses = [replace(made.generate(["a"])[0], **nothing), *made.generate(PROMPTS)]
    logprobs, values = roles.policy.logprobs_and_values(responses, roles.value)
    torch.testing.assert_close(logprobs, roles.policy.logprobs(responses), rtol=0, atol=1e-6)
    torch.testing.assert_close(values, roles.value.values(responses), rtol=0, atol=1e-6)
    assert values.std() > 1e-3


def test_the_trace_shows_the_shared_calls() -> None:
    common = {"generate", "score", "select", "experience", "reference_logprobs", "next_state", "push_weights"}

    def names(*, reuses: bool, steps_done: int = 1) -> set[str]:
        config, options = PPOConfig(critic_warmup_steps=1), {"shares_trunk": True, "steps_done": steps_done}
        return {call.name for call in trace_step(config, reuses_sampled_logprobs=reuses, **options)} - common

    assert names(reuses=True) == {"sampled_logprobs", "values", "train_policy_and_value"}
    assert names(reuses=False) == {"policy_logprobs_and_values", "train_policy_and_value"}
    assert names(reuses=True, steps_done=0) == {"sampled_logprobs", "values", "train_value"}
    assert names(reuses=False, steps_done=0) == {"policy_logprobs_and_values", "train_value"}
    groups = PPOConfig(advantage="group_centred", responses_per_prompt=2)
    calls = trace_step(groups, reuses_sampled_logprobs=False, shares_trunk=True)
    assert {call.name for call in calls} >= {"policy_logprobs", "train_policy"}


@pytest.mark.parametrize("adapter", [False, True])
def test_every_trainable_tensor_of_both_moves_and_the_base_of_an_adapter_does_not(adapter: bool) -> None:
    policy = LanguageModel(tiny_language_model())
    policy = policy.with_adapter(LoRAOptions(rank=2)) if adapter else policy
    made = trainer(policy=policy)
    before, head = weights(policy.model), weights(head_of(made))
    (first, *_) = made.train(PROMPTS, reward=count_a_and_letters)
    assert moved(before, policy.model) == [p.requires_grad for p in policy.model.parameters()]
    assert moved(head, head_of(made)) == [True]
    assert first["throughput/train_tokens_per_second"] > 0
    assert "time/train_policy_and_value_seconds" in first


def test_the_reference_of_an_adapter_is_its_base_whatever_the_value_head_learned() -> None:
    policy = LanguageModel(tiny_language_model()).with_adapter(LoRAOptions(rank=2))
    made = trainer(policy=policy)
    responses = made.generate(PROMPTS)
    (before, _), logprobs = made.roles.reference.logprobs(responses), made.roles.policy.logprobs(responses)
    made.train(PROMPTS, reward=count_a_and_letters)
    assert made.roles.reference.logprobs(responses)[0].equal(before)
    assert not made.roles.policy.logprobs(responses).equal(logprobs)


@pytest.mark.parametrize("precision", list(Precision))
def test_before_anything_is_learned_of_a_step_the_ratio_is_one(precision: Precision) -> None:
    policy = LanguageModel(tiny_language_model(), precision=precision)
    lines = trainer(policy=policy).train(PROMPTS, reward=count_a_and_letters)
    limit = 1e-2 if precision.is_half else 1e-5
    assert all(line["first_minibatch/max_abs_log_ratio"] < limit for line in lines)
    assert all(line["first_minibatch/limit_exceeded"] == 0 for line in lines)


def test_in_the_warmup_the_head_learns_at_its_own_rate_and_the_trunk_waits() -> None:
    made = trainer(critic_warmup_steps=2, num_steps=4, value_optimizer={"learning_rate": 3e-3, "schedule": "linear"})
    seen, gradients = [(weights(made.policy.model), weights(head_of(made)))], []

    def look(*_: Any) -> None:
        seen.append((weights(made.policy.model), weights(head_of(made))))
        gradients.append([p.grad for p in made.policy.model.parameters() if p.grad is not None])

    lines = made.train(PROMPTS, reward=count_a_and_letters, on_step=look)
    assert gradients == [[]] * 4
    for step, ((trunk, head), (trunk_after, head_after)) in enumerate(pairwise(seen)):
        assert any(not a.equal(b) for a, b in zip(trunk, trunk_after, strict=True)) == (step >= 2)
        assert not head[0].equal(head_after[0])
    assert [line["progress/updates"] for line in lines] == [0, 0, 4, 8]
    # Eight updates of the head: the last of the first step is its fourth.
    assert [line.get("value/learning_rate") for line in lines[:3]] == pytest.approx([3e-3 * 5 / 8, 3e-3 / 8, None])
    assert "policy/loss" not in lines[0]


def test_rescaling_the_head_moves_no_value() -> None:
    policy = LanguageModel(tiny_language_model())
    made = trainer(policy=policy, value=scalar_on(policy, HeadStart.NORMAL), value_loss={"normalise": "exponential"})
    responses = made.generate(PROMPTS)
    before = made.roles.value.values(responses)
    made.roles.value.scale.follow(torch.ones(3), torch.tensor([1.0, 20.0, -90.0]), torch.ones(3, dtype=torch.bool))
    assert made.roles.value.scale.units.scale > 10
    torch.testing.assert_close(made.roles.value.values(responses), before, rtol=1e-5, atol=1e-6)


def test_the_moving_average_and_the_full_kl_take_no_part_of_the_head() -> None:
    ended = {"max_new_tokens": 6, "stop_token_ids": list(range(6, 30))}
    cut = {"truncation": "bootstrap"}
    made = trainer(average_decay=0.5, kl={"estimator": "full"}, rollout=ended, **cut)
    lines = made.train(PROMPTS, reward=count_a_and_letters)
    names = {name for name, _ in made.policy.model.named_parameters()}
    assert names == {name for name, _ in made.roles.average.model.model.named_parameters()}
    assert lines[-1]["kl/sequence"] != 0


@pytest.mark.soak
def test_the_values_come_to_explain_the_returns() -> None:
    """Each prompt has a level of its own, which the head can learn; what is left is what the policy does. The threshold
    stands three standard deviations below the mean over 20 seeds."""
    letters = ["a", "b", "c", "d"]

    def levels(prompts: Any, responses: Any, metadata: Any) -> list[float]:
        return [letters.index(p) + text.count(p) / 4 for p, text in zip(prompts, responses, strict=True)]

    options = {"prompts_per_step": 32, "minibatch_responses": 8, "rollout": {"max_new_tokens": 4}, "num_steps": 15}
    model, tokenizer = tiny_language_model(), tiny_tokenizer(chat=False)
    optimizer = {"policy_optimizer": {"learning_rate": 1e-2}, "kl": {"coefficient": 0.02}}
    made = PPOTrainer(model, tokenizer, value="trunk", config=PPOConfig(**options, **optimizer))
    explained = [line["value/explained_variance"] for line in made.train(letters, reward=levels)]
    assert explained[0] == 0
    assert mean(explained[-5:]) > 0.78 - 3 * 0.06


def test_a_critic_that_is_not_needed_is_not_made() -> None:
    made = trainer(advantage="group_centred", responses_per_prompt=2)
    assert made.roles.value is None
    assert "value/loss" not in made.train(PROMPTS, reward=count_a_and_letters)[0]


def test_options_of_another_kind_of_critic_are_refused() -> None:
    with pytest.raises(ConfigError, match="ppo.value_optimizer is not used on a shared trunk"):
        trainer(value_optimizer={"learning_rate": 1e-3})
    with pytest.raises(ConfigError, match=r"ppo\.value_loss\.coefficient weighs"):
        trainer(value=None, value_loss={"coefficient": 0.1})
    policy = LanguageModel(tiny_language_model())
    with pytest.raises(ConfigError, match="ppo.value_optimizer is not used on a shared trunk"):
        trainer(policy=policy, value=scalar_on(policy), value_optimizer={"learning_rate": 1e-3})
