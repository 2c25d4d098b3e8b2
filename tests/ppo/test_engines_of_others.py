"""A trainer with an engine that somebody else wrote: it gets the weights when they change, and its word is checked."""

import time
from functools import partial
from typing import Any

import pytest
import torch

from builders import tiny_language_model, tiny_tokenizer
from foreign_engine import ForeignEngine
from ppo_trainers import PROMPTS, count_a, ppo_trainer
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ConfigError, TrainingError
from proximo.models.language import LanguageModel
from proximo.models.precision.placement import Precision
from proximo.ppo.trainer import PPOTrainer
from proximo.rollout.engine import Holding, fingerprint
from proximo.rollout.local import LocalEngine

trainer = partial(ppo_trainer, num_steps=3, responses_per_prompt=2)


def test_an_engine_of_its_own_weights_gets_them_at_the_start_and_after_every_step() -> None:
    policy = LanguageModel(tiny_language_model())
    engine = ForeignEngine(policy)
    made = trainer(engine=engine, policy=policy)
    held: list[Holding | None] = []
    versions: list[int] = []

    def look(step: int, line: Any) -> None:
        held.append(engine.holds())
        now = fingerprint(dict(policy.trainable_parameters()))
        assert held[-1] == Holding(version=made.policy_version, fingerprint=now)
        versions.append(made.policy_version)

    history = made.train(PROMPTS, reward=count_a, on_step=look)
    assert versions == [8, 16, 24]
    assert engine.loaded == [0, *versions]
    assert [line["progress/updates"] for line in history] == versions
    assert all("time/policy_logprobs_seconds" in line for line in history)


def test_what_its_log_probs_are_is_not_taken_for_the_learners() -> None:
    """The first minibatch of a step then has a ratio of 1: the old ones are the learner's own, whatever came."""
    policy = LanguageModel(tiny_language_model(initializer_range=0.3))
    made = trainer(engine=ForeignEngine(policy), policy=policy)
    responses = made.generate(PROMPTS)
    sampled = torch.cat([each.logprobs for each in responses])
    own = made.roles.policy.logprobs(responses)
    assert (sampled - own).abs().max() > 1e-3
    (line, *_) = made.train(PROMPTS, reward=count_a)
    assert line["first_minibatch/max_abs_log_ratio"] < 1e-5
    assert not made.reuses_sampled_logprobs
    assert trainer().reuses_sampled_logprobs


def test_it_samples_from_the_policy_as_it_is_by_then() -> None:
    """As the built-in engine does, but for what bf16 takes away."""
    policy = LanguageModel(tiny_language_model())
    made, plain = trainer(engine=ForeignEngine(policy), policy=policy), trainer()
    for each in (made, plain):
        each.train(PROMPTS, reward=count_a)
    responses = made.generate(PROMPTS)
    assert {each.policy_version for each in responses} == {24}
    nearly = torch.cat([each.logprobs for each in responses]) - made.roles.policy.logprobs(responses)
    assert nearly.abs().mean() < 0.02
    stale = trainer().roles.policy.logprobs(responses)
    assert (torch.cat([each.logprobs for each in responses]) - stale).abs().mean() > 0.1


def test_while_the_critic_warms_up_nothing_is_sent() -> None:
    policy = LanguageModel(tiny_language_model())
    engine = ForeignEngine(policy)
    trainer(engine=engine, policy=policy, critic_warmup_steps=2).train(PROMPTS, reward=count_a)
    assert engine.loaded == [0, 8]


def test_an_engine_that_does_not_take_the_weights_stops_the_run() -> None:
    policy = LanguageModel(tiny_language_model())
    engine = ForeignEngine(policy)
    made = trainer(engine=engine, policy=policy)
    made.generate(PROMPTS)
    engine.load_weights = lambda version, tensors: None  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="given the policy's weights of version 8, but holds version 0"):
        made.train(PROMPTS, reward=count_a)


def test_an_engine_that_was_started_anew_gets_the_weights_before_it_samples() -> None:
    policy = LanguageModel(tiny_language_model())
    engine = ForeignEngine(policy)
    made = trainer(engine=engine, policy=policy)
    made.generate(PROMPTS)
    engine.loaded.clear()
    made.generate(PROMPTS)
    assert engine.loaded == [0]


def test_the_full_kl_wants_policy_and_reference_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, reference = (LanguageModel(tiny_language_model(seed=seed)) for seed in (0, 1))
    devices = {id(policy): torch.device("cuda", 0), id(reference): torch.device("cuda", 1)}
    monkeypatch.setattr(LanguageModel, "device", property(lambda model: devices[id(model)]))
    config = PPOConfig(kl={"estimator": "full"})
    with pytest.raises(ConfigError, match="policy is on cuda:0 and the reference on cuda:1: put both on one device"):
        PPOTrainer(policy, tiny_tokenizer(), reference=reference, config=config)


def test_an_engine_never_writes_into_the_model_of_somebody_else() -> None:
    """The reference of a run, and the policy of another trainer, whose engine two trainers share."""
    reference = LanguageModel(tiny_language_model(seed=1))
    before = {name: tensor.clone() for name, tensor in reference.model.state_dict().items()}
    engine = LocalEngine(reference, tiny_tokenizer(), eos_token_ids=[1])
    made = PPOTrainer(LanguageModel(tiny_language_model(seed=2)), tiny_tokenizer(), reference=reference, engine=engine)
    made.generate(["ab"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in reference.model.state_dict().items())
    first = PPOTrainer(tiny_language_model(seed=3), tiny_tokenizer())
    trained = {name: tensor.clone() for name, tensor in first.policy.model.state_dict().items()}
    second = PPOTrainer(tiny_language_model(seed=4), tiny_tokenizer(), engine=first.roles.policy.engine)
    second.generate(["ab"])
    assert all(torch.equal(tensor, trained[name]) for name, tensor in first.policy.model.state_dict().items())


def test_a_float32_engine_under_a_bf16_learner_is_no_source_of_old_logprobs() -> None:
    engine = LocalEngine(LanguageModel(tiny_language_model(seed=1)), tiny_tokenizer(), eos_token_ids=[1])
    made = PPOTrainer(
        LanguageModel(tiny_language_model(seed=1), precision=Precision.BF16), tiny_tokenizer(), engine=engine
    )
    assert engine.logprobs_are_the_learners
    assert not made.reuses_sampled_logprobs


class _Refusing(ForeignEngine):
    """Runs out of memory when it is sent weights for the second time."""

    def load_weights(self, version: int, tensors: Any) -> None:
        if version > 0:
            raise MemoryError
        super().load_weights(version, tensors)


def test_a_step_whose_end_fails_is_named_and_not_counted() -> None:
    made = trainer(engine=_Refusing(LanguageModel(tiny_language_model())), average_decay=0.5)
    with pytest.raises(TrainingError, match="step 1: .*push_weights"):
        made.train(PROMPTS, reward=count_a)
    assert made.state.steps_done == 0


class _Slow(ForeignEngine):
    """Takes a while to load what it is sent."""

    def load_weights(self, version: int, tensors: Any) -> None:
        time.sleep(0.3)
        super().load_weights(version, tensors)


def test_the_seconds_of_a_step_hold_its_end() -> None:
    made = trainer(engine=_Slow(LanguageModel(tiny_language_model())))
    made.generate(PROMPTS)  # the first weights
    assert made.train(PROMPTS, reward=count_a)[-1]["time/step_seconds"] > 0.3
