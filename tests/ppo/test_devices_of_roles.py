"""Each batch goes to the device of the role that reads it, and what is found there is fetched once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from builders import tiny_language_model, tiny_tokenizer
from proximo.config.ppo.options import PPOConfig
from proximo.config.run import RunConfig
from proximo.errors import ConfigError
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, pack_trajectories
from proximo.models.precision import placement
from proximo.models.precision.placement import Precision
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.ppo import step
from proximo.ppo.from_recipe import build_task
from proximo.ppo.recipe import PPORecipe
from proximo.ppo.roles.policy import sampled_logprobs
from proximo.ppo.trainer import PPOTrainer
from proximo.ppo.update import epochs
from proximo.records import Experience, Passes, Prompt, Response, Scored, ScoreState
from proximo.run.make import models
from tiny_runs import LORA, changed, make_inputs, recipe_of

VALUE_ELSEWHERE = {"devices": {"value": {"device": "cuda:1"}}}
REFERENCE_ELSEWHERE = {"reference": {"device": "cuda:1"}}
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

    def pack(*given: Any, device: torch.device, sampling_mask: None) -> PackedResponses:
        asked.append(str(device))
        return pack_trajectories(*given)

    responses = trainer.generate([Prompt(id=str(n), token_ids=(5, 6, 7)) for n in range(4)])
    for kind in (LanguageModel, ScalarModel):
        monkeypatch.setattr(kind, "device", property(lambda model: of[id(model)]))
    monkeypatch.setattr(epochs, "pack_trajectories", pack)
    monkeypatch.setattr(epochs, "send", lambda tensor, device: (asked.append(str(device)), tensor)[1])
    policy, reference, value = trainer.roles.policy, trainer.roles.reference, trainer.roles.value
    calls = [(policy.old_logprobs, "cuda:0"), (reference.logprobs, "cuda:1"), (value.values, "cuda:2")]
    for call, device in calls:
        asked.clear()
        call(responses)
        assert set(asked) == {device}
    for train, device in ((policy.train, "cuda:0"), (value.train, "cuda:2")):
        made = experience_of(trainer, responses)
        asked.clear()
        train(made, trainer.state)
        assert set(asked) == {device}


def experience_of(trainer: PPOTrainer, responses: list[Response]) -> Experience:
    scored = [Scored(response=r, score=float(n), state=ScoreState.SCORED) for n, r in enumerate(responses)]
    roles = trainer.roles
    passes = Passes(
        old_logprobs=sampled_logprobs(responses),
        reference_logprobs=roles.reference.logprobs(responses).logprobs,
        values=roles.value.values(responses),
    )
    return step.experience_of(scored, passes, trainer.state, config=trainer.config).experience


def test_what_all_batches_found_is_fetched_at_once(trainer: PPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    responses = trainer.generate([Prompt(id=str(n), token_ids=(5, 6, 7)) for n in range(4)])
    assert sum(len(each.prompt.token_ids) + len(each.token_ids) for each in responses) > 16  # more than one batch
    fetched: list[int] = []
    plain = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (fetched.append(1), plain(tensor))[1])
    for call in (trainer.roles.policy.logprobs, trainer.roles.value.values):
        fetched.clear()
        call(responses)
        assert len(fetched) == 1


def test_a_recipe_puts_each_role_on_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that are not here: what is asked for is noted, and done on the CPU."""
    asked: dict[str, list[str]] = {"language": [], "scalar": [], "moved": []}
    language, scalar, to = models.load_language_model, models.load_scalar_model, torch.nn.Module.to

    def load_language(source: Any, *, device: torch.device, **more: Any) -> LanguageModel:
        asked["language"].append(str(device))
        return language(source, device=torch.device("cpu"), **more)

    def load_scalar(source: Any, *, device: torch.device, **more: Any) -> ScalarModel:
        asked["scalar"].append(str(device))
        return scalar(source, device=torch.device("cpu"), **more)

    def move(model: torch.nn.Module, *given: Any, **more: Any) -> torch.nn.Module:
        if "cuda" not in str(given):
            return to(model, *given, **more)
        asked["moved"].append(str(given[0]))
        return model

    monkeypatch.setattr(models, "load_language_model", load_language)
    monkeypatch.setattr(models, "load_scalar_model", load_scalar)
    monkeypatch.setattr(models, "resolve_device", torch.device)
    monkeypatch.setattr(torch.nn.Module, "to", move)
    place = make_inputs(tmp_path)
    devices = {
        "model": {"path": str(place / "language_model")},
        "reference": {"path": str(place / "language_model")},
        "devices": {"policy": {"device": "cuda:1"}, "reference": {"device": "cuda:2"}, "value": {"device": "cuda:4"}},
        "reward.0.device": "cuda:3",
    }
    recipe = changed(recipe_of("ppo", place), devices)
    build_task(PPORecipe.model_validate(recipe))
    assert asked == {"language": ["cuda:1", "cuda:2"], "scalar": ["cuda:3", "cuda:4"], "moved": []}
    build_task(PPORecipe.model_validate(changed(recipe, {"value.init_from": "policy"})))
    assert asked["moved"] == ["cuda:4"], "the copy of the policy"
    for lists in asked.values():
        lists.clear()
    none = {"devices": {}, "reward.0.device": None}
    build_task(PPORecipe.model_validate(changed(recipe, {**none, "run.device": "cuda:7"})))
    assert asked == {"language": ["cuda:7", "cuda:7"], "scalar": ["cuda:7", "cuda:7"], "moved": []}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"reward.0.share_base": True, "reward.0.device": "cuda:1"},
            "reward.0 is made from .*: remove reward.0.device",
        ),
        ({"reward.0.share_base": True, **VALUE_ELSEWHERE}, "value is made from the policy's own weights"),
        (
            {"model.lora": LORA, "value": {"init_from": "policy", "lora": LORA}, **VALUE_ELSEWHERE},
            "value is made from the policy's own weights",
        ),
        ({"devices": REFERENCE_ELSEWHERE}, "the reference is made from the policy's own weights"),
        ({"devices": {"policy": {"device": "gpu"}}}, "the device must be auto, cpu"),
    ],
)
def test_places_that_cannot_be_are_refused_before_anything_is_loaded(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    recipe = changed(recipe_of("ppo", make_inputs(tmp_path)), changes)
    with pytest.raises(ValidationError, match=message):
        PPORecipe.model_validate(recipe)


def test_a_role_has_the_precision_of_its_own_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` is bf16 on a CUDA device, also where the rest of the run is on a CPU; tf32 is for CUDA alone."""
    monkeypatch.setattr(models, "resolve_device", torch.device)
    monkeypatch.setattr(placement, "_has_bf16", lambda device: device.startswith("cuda"))
    on_cpu = models.prepare_device(RunConfig(folder=str(tmp_path), device="cpu", precision="auto"))
    assert on_cpu.precision is Precision.FLOAT32
    assert on_cpu.on("cuda:0").precision is Precision.BF16
    assert on_cpu.on(None).precision is Precision.FLOAT32
    with placement.without_tf32():
        on_cuda = models.prepare_device(RunConfig(folder=str(tmp_path), device="cuda", precision="tf32"))
    with pytest.raises(ConfigError, match="tf32 is for CUDA devices, and the device is cpu"):
        on_cuda.on("cpu")
