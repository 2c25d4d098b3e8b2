"""Four roles on one base: what the trainer learns is what four separate models learn; which recipes can share."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import tiny_language_model
from ppo_trainers import LARGE, PROMPTS, ppo_trainer
from proximo.commands.export import run_export
from proximo.errors import ModelError
from proximo.learner.update import Learner
from proximo.models.language import LanguageModel
from proximo.models.loading import load_language_model, load_scalar_model
from proximo.models.lora import LoRAOptions, load_adapter
from proximo.models.packing import pack
from proximo.models.pretrained.saving import save_pretrained
from proximo.models.pretrained.sources import ModelSource
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.models.sharing import is_shared, scalar_from_adapter, value_on_base
from proximo.ppo.from_recipe import build_task
from proximo.ppo.recipe import PPORecipe
from proximo.ppo.trainer import PPOTrainer
from proximo.rewards.model import ModelReward
from proximo.run import journal
from proximo.run.checkpoint_lookup import find_checkpoint
from proximo.run.loop import run_trainer
from proximo.run.options import RunOptions
from tiny_runs import LORA, changed, make_inputs, recipe_of

OPTIONS = LoRAOptions(rank=2)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with a base, and beside it the adapter of a reward model that was trained on it."""
    folder = tmp_path / "base"
    save_pretrained(tiny_language_model(seed=1), folder)
    reward = scalar_from_language_model(loaded(folder), HeadStart.NORMAL, seed=3).with_adapter(OPTIONS)
    with torch.no_grad():
        for _, parameter in reward.trainable_parameters():
            parameter.add_(0.05)
    save_pretrained(reward.model, tmp_path / "reward")
    return folder


def loaded(folder: Path) -> LanguageModel:
    model = tiny_language_model(seed=1)
    model.config._name_or_path = model.name_or_path = str(folder)
    return LanguageModel(model)


def four_roles(base: Path, *, shared: bool, checkpointing: bool) -> PPOTrainer:
    policy = loaded(base).with_adapter(OPTIONS)
    if shared:
        value = value_on_base(policy, OPTIONS, HeadStart.ZERO)
        reward = scalar_from_adapter(policy, base.with_name("reward"), role="reward")
    else:
        value = scalar_from_language_model(loaded(base), HeadStart.ZERO).with_adapter(OPTIONS)
        plain = scalar_from_language_model(loaded(base), HeadStart.ZERO)
        reward = ScalarModel(load_adapter(plain.base, base.with_name("reward")))
    if checkpointing:
        policy.use_activation_checkpointing()
        value.use_activation_checkpointing()
    options = {"num_steps": 2, "epochs_per_step": 1, "minibatch_responses": 2, "value_optimizer": LARGE}
    # the reference runs between the policy's forward and its backward
    kl = {"kind": "loss", "estimator": "full"}
    return ppo_trainer(policy, value=value, reward=ModelReward(reward), kl=kl, **options)


def learned(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    models = {"policy": trainer.policy, "value": trainer.roles.value.model}
    return {f"{role} {name}": p.detach().clone() for role, m in models.items() for name, p in m.trainable_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_four_roles_on_one_base_are_four_separate_models(
    base: Path, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs, values, scores, gradients and weights of two steps, bit for bit."""
    gradients: list[torch.Tensor] = []
    apply = Learner._apply

    def watched(self: Learner, *given: Any) -> None:
        gradients.extend(p.grad.clone() for p in self.parameters.values() if p.grad is not None)
        apply(self, *given)

    monkeypatch.setattr(Learner, "_apply", watched)
    found = []
    for shared in (True, False):
        gradients.clear()
        trainer = four_roles(base, shared=shared, checkpointing=checkpointing)
        assert is_shared(trainer.roles.value.model, trainer.policy) is shared
        numbers = []
        for _ in range(2):
            responses = trainer.generate(PROMPTS)
            scored = trainer.roles.reward.score(responses, (), trainer.state)
            passed = trainer.run_step(scored=scored).experience
            numbers += [torch.tensor([each.score for each in scored]), passed.old_logprobs, passed.values]
        found.append((numbers, list(gradients), list(learned(trainer).values())))
    for ours, separate in zip(*found, strict=True):
        assert len(ours) == len(separate)
        assert all(torch.equal(first, second) for first, second in zip(ours, separate, strict=True))
    assert len(found[0][1]) == 2 * 2 * len(learned(trainer))


def test_a_step_moves_every_tensor_of_its_role_and_none_of_another(base: Path) -> None:
    trainer = four_roles(base, shared=True, checkpointing=True)
    scorer: Any = trainer.roles.reward.source
    everything = {
        **{id(p): p for _, p in trainer.policy.model.named_parameters()},
        **{id(p): p for _, p in trainer.roles.value.model.model.named_parameters()},
        **{id(p): p for _, p in scorer.model.model.named_parameters()},
    }
    owned = {role: {id(p) for p in learner.parameters.values()} for role, learner in trainer.learners.items()}
    assert not owned["policy"] & owned["value"]
    # Both adapters and the head leave their start, at which some gradients are 0.
    experience = trainer.run_step(scored=scorer.score(trainer.generate(PROMPTS))).experience
    trainer.roles.policy.check_first = False  # it would say that the experience is an old one
    later = replace(trainer.state, steps_done=9)
    for role, train in (
        ("value", lambda: trainer.roles.value.train(experience, later)),
        ("policy", lambda: trainer.roles.policy.train(experience, later, trainer.roles.reference)),
    ):
        before = {key: parameter.detach().clone() for key, parameter in everything.items()}
        train()
        moved = {key for key, parameter in everything.items() if not parameter.equal(before[key])}
        assert moved == owned[role]


def test_with_a_policy_that_trains_in_full_nothing_is_shared() -> None:
    trainer = ppo_trainer(num_steps=1)
    assert not is_shared(trainer.roles.reference.model, trainer.policy)
    assert not is_shared(trainer.roles.value.model, trainer.policy)


# Runs of recipes.


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(journal, "write_report", lambda folder: folder / "report.html")
    return make_inputs(tmp_path)


def sharing(place: Path, **changes: Any) -> dict[str, Any]:
    """A recipe with four roles on one base."""
    scorer = {"kind": "model", "path": str(place / "reward_adapter"), "share_base": True}
    own = {"model.lora": LORA, "value": {"init_from": "policy", "lora": LORA}, "reward": [scorer]}
    return changed(recipe_of("ppo", place), own | changes)


def build(recipe: Mapping[str, Any]):
    return build_task(PPORecipe.model_validate(recipe))


@pytest.mark.parametrize("start", ["policy", "reward"])
def test_a_recipe_holds_one_base_and_says_so(place: Path, start: str) -> None:
    task = build(sharing(place, value={"init_from": start} | ({"lora": LORA} if start == "policy" else {})))
    assert "one copy of the base serves the policy and reference, value, reward_model" in task.notes
    roles, (_, scorer) = task.ppo.roles, task.reward.sources[0]
    assert all(is_shared(model, task.ppo.policy) for model in (roles.reference.model, roles.value.model, scorer.model))
    assert all("lora_" in name or "score" in name for name in task.ppo.learners["value"].parameters)
    assert not any(parameter.requires_grad for parameter in scorer.model.model.parameters())
    head = next(p for name, p in roles.value.model.model.named_parameters() if "score.modules_to_save" in name)
    trained = next(p for name, p in scorer.model.model.named_parameters() if "score.modules_to_save" in name)
    assert head.equal(trained) is (start == "reward")
    assert head is not trained


def test_what_is_saved_loads_as_the_roles_that_were_trained(place: Path) -> None:
    """Policy and value adapters in peft's form; merged into the base, each brings its own part alone."""
    assert run_trainer(PPORecipe.model_validate(sharing(place)), RunOptions(quiet=True)) == 0
    checkpoint = find_checkpoint(place / "run")
    for role in ("policy", "value"):
        saved = json.loads((checkpoint.path(role) / "adapter_config.json").read_text())
        assert saved["base_model_name_or_path"] == str(place / "language_model")
        out = place / f"{role}-merged"
        assert run_export(place / "run", out, role=role, merge=True) == 0
    again = build(sharing(place))
    again.restore(checkpoint)
    prompt = again.prompts[0].token_ids
    packed, cpu = pack([prompt]), torch.device("cpu")
    merged = load_language_model(ModelSource(path=str(place / "policy-merged")), device=cpu)
    critic = load_scalar_model(ModelSource(path=str(place / "value-merged")), fresh_head=None, device=cpu)
    with torch.no_grad():
        expected = again.ppo.policy.hidden_states(packed)
        torch.testing.assert_close(merged.hidden_states(packed), expected, rtol=0, atol=1e-5)
        values = again.ppo.roles.value.model.token_scores(packed)
        torch.testing.assert_close(critic.token_scores(packed), values, rtol=0, atol=1e-5)
        assert (expected - again.ppo.roles.reference.model.hidden_states(packed)).abs().max() > 1e-3


def test_a_reward_adapter_of_another_base_is_refused(place: Path) -> None:
    with pytest.raises(ModelError, match="was trained on .*language_model, but the policy's base is .*other"):
        build(sharing(place, model={"path": str(place / "other"), "lora": LORA}))


def test_an_adapter_without_share_base_is_refused_with_both_ways_out(place: Path) -> None:
    recipe = sharing(place)
    recipe["reward"][0]["share_base"] = False
    with pytest.raises(ModelError, match="export it with --merge.*or give.*share_base: true"):
        build(recipe)
