"""Each batch goes to the device of the role that reads it, and what is found there is fetched once."""

from typing import Any

import pytest
import torch

from builders import tiny_language_model, tiny_tokenizer
from proximo.config.ppo.options import PPOConfig
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, pack_responses
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.ppo.roles.driver import driver_handlers
from proximo.ppo.trainer import PPOTrainer
from proximo.ppo.update import micro_batching
from proximo.records import Experience, Prompt, Response, Scored, ScoreState

DEVICES = {"policy": torch.device("cuda", 0), "reference": torch.device("cuda", 1), "value": torch.device("cuda", 2)}


@pytest.fixture
def trainer() -> PPOTrainer:
    policy = LanguageModel(tiny_language_model())
    config = PPOConfig(
        num_steps=1, prompts_per_step=4, minibatch_responses=2, tokens_per_microbatch=16, rollout={"max_new_tokens": 4}
    )
    value = scalar_from_language_model(policy, HeadStart.NORMAL, seed=1)
    return PPOTrainer(policy, tiny_tokenizer(), value=value, config=config)


def test_batches_go_to_the_device_of_their_role(trainer: PPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that are not here: what they were asked for is noted, and done on the CPU."""
    asked: list[str] = []
    of = {id(getattr(trainer.roles, name).model): device for name, device in DEVICES.items()}

    def pack(*given: Any, device: torch.device) -> PackedResponses:
        asked.append(str(device))
        return pack_responses(*given)

    responses = trainer.generate([Prompt(id=str(n), token_ids=(5, 6, 7)) for n in range(4)])
    for kind in (LanguageModel, ScalarModel):
        monkeypatch.setattr(kind, "device", property(lambda model: of[id(model)]))
    monkeypatch.setattr(micro_batching, "pack_responses", pack)
    monkeypatch.setattr(micro_batching, "send", lambda tensor, device: (asked.append(str(device)), tensor)[1])
    group = trainer.roles.group
    for role, call, device in (
        ("policy", "policy_logprobs", "cuda:0"),
        ("reference", "reference_logprobs", "cuda:1"),
        ("value", "values", "cuda:2"),
    ):
        asked.clear()
        group[role].handlers[call](responses)
        assert set(asked) == {device}
    for name, device in (("policy", "cuda:0"), ("value", "cuda:2")):
        experience = experience_of(trainer, responses)
        asked.clear()
        group[name].handlers[f"train_{name}"](experience, trainer.state)
        assert set(asked) == {device}


def experience_of(trainer: PPOTrainer, responses: list[Response]) -> Experience:
    scored = [Scored(response=r, score=float(n), state=ScoreState.SCORED) for n, r in enumerate(responses)]
    roles = trainer.roles
    assert roles.value is not None
    assert roles.reference is not None
    (values,), (reference, full) = roles.value.values(responses), roles.reference.logprobs(responses)
    own = driver_handlers(trainer.state, trainer.config, device=torch.device("cpu"))
    (old,) = own["sampled_logprobs"](responses)
    return own["experience"](scored, old, reference, full, values)[0]


def test_what_all_batches_found_is_fetched_at_once(trainer: PPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    responses = trainer.generate([Prompt(id=str(n), token_ids=(5, 6, 7)) for n in range(4)])
    assert sum(len(each.prompt.token_ids) + len(each.token_ids) for each in responses) > 16  # more than one batch
    fetched: list[int] = []
    plain = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (fetched.append(1), plain(tensor))[1])
    assert trainer.roles.value is not None
    for call in (trainer.roles.policy.logprobs, trainer.roles.value.values):
        fetched.clear()
        call(responses)
        assert len(fetched) == 1
