"""Distillation: the KL from a teacher is all that is learned, in any cut, and a student becomes its teacher."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import PreTrainedModel

from builders import tiny_language_model, tiny_tokenizer
from ppo.test_updates import Gathered, worst_difference
from proximo.checkpoint.store import CheckpointStore
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ConfigError, ModelError
from proximo.models.heads import OutputHead, full_divergence
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.ppo.from_recipe import build_task
from proximo.ppo.recipe import PPORecipe
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Experience
from proximo.rewards.source import NoReward
from proximo.run.options import RunOptions
from records_made import drawn
from roles_made import experience_of, roles_of, state
from run_outcomes import read_lines
from tiny_runs import LLAMA, changed, make_inputs, recipe_of, run

FULL = {"kind": "loss", "estimator": "full", "coefficient": 1.0}
LENGTHS = [(3, 5), (2, 1), (6, 9), (1, 4), (4, 7), (2, 3)]


def config(**options: Any) -> PPOConfig:
    base = {"prompts_per_step": 6, "epochs_per_step": 1, "minibatch_responses": 6, "advantage": "return_to_go"}
    return PPOConfig(**(base | {"kl": FULL} | options))


def student() -> PreTrainedModel:
    return tiny_language_model(seed=1, dtype=torch.float64)


def teacher(**options: Any) -> PreTrainedModel:
    """A larger model than the student, and of another depth."""
    return tiny_language_model(seed=2, hidden_size=32, num_hidden_layers=1, dtype=torch.float64, **options)


def update(**options: Any) -> tuple[dict[str, Tensor], dict[str, Any], Experience]:
    """Gradient and metrics of one update, and what it learned from."""
    policy, reference = LanguageModel(student()), LanguageModel(teacher().requires_grad_(False))
    chosen = config(**options)
    roles = roles_of(chosen, policy, reference=reference)
    experience = experience_of(roles, [replace(each, score=0.0) for each in drawn(LENGTHS)], kl_coefficient=1.0)
    roles.policy.learner = learner = Gathered(policy.model)
    report = roles.policy.train(experience, state(1.0), roles.reference)
    return learner.gradients[0], {name: value.value for name, value in report.metrics.items()}, experience


def plainly(experience: Experience, temperature: float) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Reverse KL per token, share of equal top tokens, and gradient: one response at a time, by transformers."""
    mine, other, total, same = student(), teacher(), torch.zeros((), dtype=torch.float64), list[float]()
    for each in experience.scored:
        asked, written = each.response.prompt.token_ids, each.response.token_ids
        ids, states = torch.tensor([[*asked, *written]]), slice(len(asked) - 1, -1)
        own = (mine(ids).logits[0, states] / temperature).log_softmax(-1)
        with torch.no_grad():
            theirs = (other(ids).logits[0, states] / temperature).log_softmax(-1)
        # torch's kl_div(input, target) is KL(target || input).
        total = total + kl_div(theirs, own, log_target=True, reduction="sum")
        same += (own.argmax(-1) == theirs.argmax(-1)).double().tolist()
    loss = total / sum(n for _, n in LENGTHS)
    loss.backward()
    return loss.detach(), mean(same), {name: p.grad for name, p in mine.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_loss_is_the_reverse_kl_of_one_response_at_a_time_in_any_cut(temperature: float) -> None:
    """Nothing of PPO is left in it: without a reward every advantage is 0."""
    for budget in (8192, 17, 1):
        found, metrics, experience = update(rollout={"temperature": temperature}, tokens_per_microbatch=budget)
        loss, same, wanted = plainly(experience, temperature)
        assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=1e-9)
        assert metrics["kl/full_per_token"] == pytest.approx(loss.item(), rel=1e-9)
        assert metrics["kl/same_top_fraction"] == pytest.approx(same)
        assert worst_difference(wanted, found) < 1e-9
        if budget == 8192:
            whole = found
        assert worst_difference(whole, found) < 1e-10


def head(*rows: float) -> OutputHead:
    """An output layer whose logits at the state [1] are `rows`."""
    return OutputHead(weight=torch.tensor(rows, dtype=torch.float64)[:, None])


def test_rows_of_a_teacher_that_belong_to_no_token_are_left_out() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    logits = [math.sin(i) for i in range(200)]
    padded = full_divergence(one, head(*logits), one, head(*logits[::-1], 50.0, 50.0))
    assert padded.kl.item() == full_divergence(one, head(*logits), one, head(*logits[::-1])).kl.item()
    for sizes in ((200, 203), (200, 199)):
        with pytest.raises(ModelError, match="bring a reference with the policy's vocabulary"):
            full_divergence(one, head(*[0.0] * sizes[0]), one, head(*[0.0] * sizes[1]))


def distilled(*, seed: int, num_steps: int = 40, adapter: bool = False, **options: Any) -> list[dict[str, float]]:
    """The metrics of each step of a student that learns from a sharp teacher of twice its width."""
    own, other = tiny_language_model(seed=seed), tiny_language_model(seed=100 + seed, hidden_size=32)
    with torch.no_grad():
        other.get_output_embeddings().weight.mul_(20)
    before = {name: weight.clone() for name, weight in other.named_parameters()}
    policy: Any = LanguageModel(own).with_adapter(LoRAOptions(rank=8, seed=seed)) if adapter else own
    chosen: dict[str, Any] = {
        "num_steps": num_steps,
        "prompts_per_step": 32,
        "epochs_per_step": 1,
        "kl": FULL,
        "advantage": "return_to_go",
        "rollout": {"max_new_tokens": 6},
        "policy_optimizer": {"learning_rate": 1e-2, "schedule": "linear"},
    }
    trainer = PPOTrainer(
        policy,
        tiny_tokenizer(chat=False),
        reference=other,
        reward=NoReward(),
        config=PPOConfig(**(chosen | options)),
        seed=seed,
    )
    lines = trainer.train(["a", "b", "c", "d"])
    assert all(weight.equal(before[name]) for name, weight in other.named_parameters())
    return lines


@pytest.mark.soak
def test_a_student_becomes_its_teacher() -> None:
    """Thresholds three standard deviations from the means over 20 seeds: 2.27, then 0.174; 0.06, then 0.81."""
    lines = distilled(seed=0)
    assert lines[0]["kl/full_per_token"] > 1.9
    assert mean(line["kl/full_per_token"] for line in lines[-5:]) < 0.218
    assert lines[0]["kl/same_top_fraction"] < 0.142
    assert lines[-1]["kl/same_top_fraction"] > 0.709
    named = {name for line in lines for name in line}
    assert not {name for name in named if name.startswith(("score/", "group/"))}


def test_an_adapter_may_learn_from_another_model_than_its_base() -> None:
    first, *_, last = distilled(seed=0, num_steps=3, adapter=True)
    assert first["kl/full_per_token"] > 1  # from its base it would be 0
    assert last["policy/gradient_norm"] > 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"kl": "none"}, "ppo.kl leaves it out"),
        ({"kl": FULL | {"coefficient": 0}}, "ppo.kl leaves it out"),
        ({"advantage": "gae"}, "nothing to estimate"),
        ({"samples_per_prompt": 4}, "ppo.samples_per_prompt compares scores"),
    ],
)
def test_what_leaves_nothing_to_learn_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        distilled(seed=0, **options)
    with pytest.raises(ConfigError, match="a copy of the policy"):
        PPOTrainer(student(), tiny_tokenizer(), reward=NoReward(), config=config()).train(["a"])


def test_a_teacher_of_a_recipe_is_stored_in_bf16_under_bf16(tmp_path: Path) -> None:
    changes = {"reference": {"config": LLAMA | {"hidden_size": 32}}, "reward": [], "gold": None, "value": {}}
    changes |= {"ppo.kl": FULL, "ppo.advantage": "return_to_go", "run.precision": "bf16"}
    task = build_task(PPORecipe.model_validate(changed(recipe_of("ppo", make_inputs(tmp_path)), changes)))
    other = task.ppo.roles.reference
    matrices = [weight.dtype for name, weight in other.model.model.named_parameters() if "proj" in name]
    assert set(matrices) == {torch.bfloat16}
    assert task.step(1).metrics["kl/full_per_token"].value > 0


def test_a_run_without_a_reward_keeps_the_checkpoint_nearest_to_the_teacher(tmp_path: Path) -> None:
    place = make_inputs(tmp_path)
    recipe = changed(
        recipe_of("ppo", place),
        {
            "reference": {"config": LLAMA | {"hidden_size": 32}},
            "reward": [],
            "value": {},
            "ppo.kl": FULL,
            "ppo.advantage": "return_to_go",
        },
    )
    assert run("ppo", recipe, RunOptions(quiet=True)) == 0
    lines = read_lines(place / "run" / "metrics.jsonl")
    name = "evaluation/k3_per_token"
    evaluated = {line["step"]: line[name] for line in lines if name in line}
    assert not {name for line in lines for name in line if "score" in name.split("/")}
    assert {sample["score"] for sample in read_lines(place / "run" / "samples.jsonl")} == {None}
    best = CheckpointStore(place / "run" / "checkpoints", best="lowest").best()
    assert evaluated[best.step] == min(evaluated[step] for step in (2, 4, 5)) < evaluated[0]
