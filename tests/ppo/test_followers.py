"""The average of the policy and a reference that moves: what they are made of, and that a run goes on with them."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from builders import tiny_language_model, tiny_tokenizer
from ppo_trainers import PROMPTS, lengths, ppo_trainer
from proximo.cli import main
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ModelError
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.ppo.trainer import PPOTrainer
from proximo.run.options import RunOptions
from tiny_runs import LORA, changed, make_inputs, recipe_of, run

trainer = partial(ppo_trainer, rollout={"max_new_tokens": 4})


def weights(model: LanguageModel) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().double() for parameter in model.model.parameters()])


def test_the_reference_moves_when_it_is_told_to_and_the_kl_starts_again() -> None:
    made = trainer(kl={"reference_every_steps": 2})
    wanted, history = weights(made.policy), list[float]()

    def check(step: int, line) -> None:
        nonlocal wanted
        wanted = weights(made.policy) if step % 2 == 0 else wanted
        torch.testing.assert_close(weights(made.roles.reference.model), wanted, rtol=0, atol=1e-6)
        history.append(line["kl/sequence"])

    made.train(PROMPTS, reward=lengths, on_step=check)
    assert abs(history[2]) < 1e-5 < abs(history[1])


def test_an_evaluation_of_the_average_is_one_of_the_policy_before_it_moved() -> None:
    made = trainer(average_decay=0.999999, evaluate_average=True)
    assert made.roles.evaluated is made.roles.average is not None
    unasked = trainer(average_decay=0.9)
    assert unasked.roles.average is not None
    assert unasked.roles.evaluated is unasked.roles.policy
    made.train(PROMPTS, reward=lengths)
    fresh = trainer()
    torch.testing.assert_close(weights(made.roles.average.model), weights(fresh.policy), rtol=0, atol=1e-5)


def test_the_base_below_an_adapter_does_not_move() -> None:
    adapted = LanguageModel(tiny_language_model()).with_adapter(LoRAOptions(rank=2))
    with pytest.raises(ModelError, match="moves the reference, but that of a policy with an adapter is the base"):
        PPOTrainer(adapted, tiny_tokenizer(), config=PPOConfig(kl={"reference_every_steps": 1}))


def test_under_lora_the_average_is_one_of_the_adapter_on_the_policys_own_base() -> None:
    adapted = LanguageModel(tiny_language_model()).with_adapter(LoRAOptions(rank=2))
    options = {"num_steps": 3, "prompts_per_step": 4, "rollout": {"max_new_tokens": 4}, "average_decay": 0.75}
    config = PPOConfig(**options, evaluate_average=True, policy_optimizer={"learning_rate": 1e-2})
    made = PPOTrainer(adapted, tiny_tokenizer(), config=config)
    average = made.roles.average.model
    assert made.roles.evaluated is made.roles.average
    trained = dict(made.policy.trainable_parameters())
    for name, parameter in average.model.named_parameters():
        assert (parameter is dict(made.policy.model.named_parameters())[name]) == (name not in trained), name
    wanted = {name: parameter.detach().clone() for name, parameter in trained.items()}

    def check(step: int, line: object) -> None:
        for name, parameter in average.model.named_parameters():
            if name in trained:
                wanted[name] = 0.75 * wanted[name] + 0.25 * trained[name].detach()
                torch.testing.assert_close(parameter.detach(), wanted[name], rtol=0, atol=1e-6)

    made.train(PROMPTS, reward=lengths, on_step=check)
    assert max((trained[name] - wanted[name]).abs().max() for name in trained) > 1e-3


def test_the_average_of_an_adapter_is_saved_as_one_resumed_and_exported(tmp_path: Path) -> None:
    place = make_inputs(tmp_path)
    options = {"model": {"path": str(place / "language_model"), "lora": LORA}, "ppo.average_decay": 0.5}
    constant = {"ppo.policy_optimizer.schedule": "constant", "ppo.value_optimizer.schedule": "constant"}
    recipe = changed(recipe_of("ppo", place), options | constant | {"ppo.evaluate_average": True})
    again = changed(recipe, {"run.folder": str(place / "again"), "run.save_every_steps": 4})
    assert run("ppo", recipe, RunOptions(quiet=True)) == 0
    assert run("ppo", changed(again, {"ppo.num_steps": 4}), RunOptions(quiet=True)) == 0
    assert run("ppo", again, RunOptions(quiet=True, resume="must")) == 0
    adapters = {
        (folder, role): load_file(place / f"{folder}/checkpoints/step-000005/{role}/adapter_model.safetensors")
        for folder in ("run", "again")
        for role in ("policy", "average")
    }
    whole, resumed, policy = adapters["run", "average"], adapters["again", "average"], adapters["run", "policy"]
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert any(not torch.equal(whole[name], policy[name]) for name in whole)
    out = place / "out"
    assert main(["export", str(place / "run"), str(out), "--role", "average", "--merge"]) == 0
    assert (out / "model.safetensors").is_file()


def test_both_are_saved_and_a_run_that_was_extended_has_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    place = make_inputs(tmp_path)
    moving = {"ppo.average_decay": 0.5, "ppo.kl.reference_every_steps": 1, "ppo.kl.reference_decay": 0.25}
    constant = {"ppo.policy_optimizer.schedule": "constant", "ppo.value_optimizer.schedule": "constant"}
    recipe = changed(recipe_of("ppo", place), {**moving, **constant})
    assert run("ppo", recipe, RunOptions(quiet=True)) == 0
    saved = {role: load_file(place / f"run/checkpoints/step-000005/{role}/model.safetensors") for role in HELD}
    for one, other in (("policy", "average"), ("policy", "reference"), ("average", "reference")):
        assert any(not torch.equal(saved[one][name], saved[other][name]) for name in saved[one])
    again = changed(recipe, {"run.folder": str(place / "again"), "ppo.num_steps": 4, "run.save_every_steps": 4})
    assert run("ppo", again, RunOptions(quiet=True)) == 0
    whole = changed(recipe, {"run.folder": str(place / "again"), "run.save_every_steps": 4})
    assert run("ppo", whole, RunOptions(quiet=True, resume="must")) == 0
    resumed = {role: load_file(place / f"again/checkpoints/step-000005/{role}/model.safetensors") for role in HELD}
    assert all(torch.equal(saved[role][name], resumed[role][name]) for role in HELD for name in saved[role])


HELD = ("policy", "value", "average", "reference")
