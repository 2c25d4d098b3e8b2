"""Asynchronous rollouts in PPO: what each step learns from, and how old it is."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from builders import tiny_language_model, tiny_tokenizer
from foreign_engine import ForeignEngine
from ppo_trainers import count_a, ppo_trainer
from proximo.config.ppo.losses import PolicyLossConfig
from proximo.config.ppo.options import PPOConfig, RolloutConfig
from proximo.errors import ConfigError
from proximo.models.language import LanguageModel
from proximo.ppo.trainer import PPOTrainer
from proximo.rollout.asynchronous import AsyncRollouts
from proximo.rollout.decoding import DecodingCall
from records_made import response
from waiting import wait_until

PROMPTS = ["ab", "cde", "f", "gh", "ijk", "l", "mn"]
NUM_STEPS = 6


def trainer(staleness: int, **options: Any) -> PPOTrainer:
    rollout = {"max_new_tokens": 6, "staleness": staleness}
    return ppo_trainer(**{"num_steps": NUM_STEPS, "responses_per_prompt": 2, "rollout": rollout} | options)


@pytest.mark.parametrize("staleness", [1, 3])
def test_each_step_learns_from_its_own_prompts_within_the_bound(staleness: int) -> None:
    made = trainer(staleness)
    in_order, asked = made.in_order(made._prompts(PROMPTS)), list[list[str]]()

    def look(step: int, line: Any) -> None:
        taken = made.roles.policy.ahead.taken
        assert [each.prompt for each in taken.responses[::2]] == in_order(step - 1)
        assert line["staleness/max_steps"] <= staleness
        asked.append([each.prompt.id for each in taken.responses])

    history = made.train(PROMPTS, reward=count_a, on_step=look)
    assert len(asked) == NUM_STEPS
    assert history[0]["staleness/max_steps"] == 0
    assert history[-1]["staleness/mean_steps"] > 0
    assert history[-1]["staleness/k3"] > 0
    assert 0 < history[-1]["staleness/effective_fraction"] < 1
    assert "policy/behaviour_weight" in history[-1]
    assert not [thread for thread in threading.enumerate() if thread.name == "rollouts"]


def test_no_mismatch_is_reported_where_earlier_weights_drew_all_tokens() -> None:
    first, *later = trainer(1).train(PROMPTS, reward=count_a)
    of_all = {"mismatch/kl", "mismatch/k3", "mismatch/max_abs_log_ratio"}
    assert of_all <= first.keys()
    assert not any(of_all & line.keys() for line in later)


def test_a_bound_of_0_gives_the_bits_of_a_synchronous_run() -> None:
    """The same machine with a bound of 0, beside the synchronous run that uses it not: the same samples and weights."""
    weighted = {"policy_loss": {"behaviour_weight": "truncated"}}
    plain, ahead = trainer(0, **weighted), trainer(1, **weighted)
    worker = ahead.roles.policy
    rollouts = worker.ahead._rollouts
    rollouts._plan = replace(rollouts._plan, staleness=0)
    lines = [made.train(PROMPTS, reward=count_a) for made in (plain, ahead)]
    for one, other in zip(*lines, strict=True):
        learned = {name for name in one if not name.startswith(("time/", "throughput/", "source/", "staleness/"))}
        assert {name: one[name] for name in learned} == {name: other[name] for name in learned}
        assert other["staleness/max_steps"] == 0
    for one, other in zip(plain.policy.model.parameters(), ahead.policy.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_weights_that_are_loaded_while_it_samples_interrupt_responses() -> None:
    """Of the second step, the first tokens are drawn by the first weights, and the next ones by those that come."""
    made = trainer(2)
    calls, interrupted = list[DecodingCall](), threading.Event()
    step, is_done, begin = DecodingCall.step, DecodingCall.done.fget, AsyncRollouts._begin
    assert is_done is not None

    def noted(call: DecodingCall) -> list[Any]:
        ended = step(call)
        calls.extend([call] if call not in calls else [])
        return ended

    def patient(call: DecodingCall) -> bool:
        """Asked before each pass, while its thread does not have the turn at the engine."""
        if calls[1:2] == [call] and not interrupted.is_set():
            wait_until(lambda: call.has_stale_cache, "new weights")
            interrupted.set()
        return is_done(call)

    def in_order(ahead: AsyncRollouts, number: int, *given: Any) -> None:
        """Sample the first two steps in their order, and begin both before the learner takes the first one."""
        begin(ahead, number, *given)
        wait_until(lambda: len(calls) > min(number, 1), "the first tokens")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodingCall, "step", noted)
        patch.setattr(DecodingCall, "done", property(patient))
        patch.setattr(AsyncRollouts, "_begin", in_order)
        history = made.train(PROMPTS, reward=count_a)
    assert interrupted.is_set()
    assert [history[step]["staleness/interrupted_fraction"] > 0 for step in (0, 1)] == [False, True]
    assert [history[step]["staleness/max_steps"] for step in (0, 1)] == [0, 1]
    assert max(line["staleness/max_steps"] for line in history) <= 2
    assert all(0 < line["staleness/learner_idle_fraction"] <= 1 for line in history)


def test_behaviour_weights_are_the_default_of_asynchronous_rollouts_and_can_be_turned_off() -> None:
    def weight(**options: Any) -> str:
        found = PPOConfig(**options).policy_loss.behaviour_weight
        return "none" if found is None else found.kind

    ahead = {"rollout": {"staleness": 2}}
    assert weight() == "none"
    assert weight(**ahead) == "truncated"
    assert weight(**ahead, policy_loss={"behaviour_weight": None}) == "none"
    assert weight(**ahead, policy_loss=PolicyLossConfig(objective={"clip_low": 0.1})) == "truncated"
    assert PPOConfig(**ahead, policy_loss={"objective": {"clip_low": 0.1}}).policy_loss.objective.clip_low == 0.1
    assert weight(rollout=RolloutConfig(staleness=1), policy_loss={"behaviour_weight": "masked"}) == "masked"


def test_a_step_of_ones_own_prompts_has_no_later_ones_to_sample() -> None:
    made = trainer(1)
    with pytest.raises(ConfigError, match="which only `train` knows"):
        made.run_step(prompts=made._prompts(PROMPTS[:4]))


def test_an_engine_that_is_not_for_threads_is_refused() -> None:
    policy = LanguageModel(tiny_language_model())
    config = PPOConfig(num_steps=2, prompts_per_step=4, rollout={"staleness": 1})
    with pytest.raises(ConfigError, match="ForeignEngine does not say that it is thread_safe"):
        PPOTrainer(policy, tiny_tokenizer(), engine=ForeignEngine(policy), config=config)


def test_an_error_in_a_step_ends_the_threads_and_the_training_can_go_on() -> None:
    made = trainer(2)

    def fails(step: int, line: Any) -> None:
        if step == 2:
            raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        made.train(PROMPTS, reward=count_a, on_step=fails)
    assert not [thread for thread in threading.enumerate() if thread.name == "rollouts"]
    assert len(made.train(PROMPTS, reward=count_a)) == NUM_STEPS - 2


def test_a_version_that_only_steps_of_the_callers_own_trained_counts_as_the_one_before() -> None:
    ahead = trainer(3).roles.policy.ahead
    ahead._step_of = {0: 0, 8: 1, 24: 3}
    drawn = replace(response(token_ids=(5, 6, 7, 8)), token_versions=(0, 8, 16, 24))
    assert ahead.steps_behind([drawn], step=3).tolist() == [3, 2, 2, 0]
