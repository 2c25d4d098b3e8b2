"""What a trainer may carry from step to step besides weights: adapters, dropout, coefficients, precision, signals."""

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from disk_states import Camera

from proximo.checkpoint.logs import JsonLines
from proximo.errors import TrainingError
from proximo.run.options import RunOptions
from run_outcomes import assert_same_outcome, outcome
from tiny_runs import GPT2_WITH_DROPOUT, LLAMA, LORA, Kind, changed, make_inputs, recipe_of, run

AUTO = RunOptions(quiet=True, resume="auto")
NO_CRITIC = {"ppo.advantage": "group_standardised", "ppo.responses_per_prompt": 2}
EARLY = {"max_gradient_norm": None, "non_finite_gradient": "stop", "in_backward": True}
IN_BACKWARD = {
    "ppo.tokens_per_microbatch": 400,
    **{f"ppo.{role}_optimizer.{key}": value for role in ("policy", "value") for key, value in EARLY.items()},
}
NORMALISED = {"ppo.value_loss.normalise": "exponential", "ppo.critic_warmup_steps": 3}
ONE_OPTIMIZER = {"ppo.value_optimizer": {"learning_rate": 1e-5}}

VOWELS = {"reward": [{"kind": "function", "function": "tiny_runs:share_of_vowels"}], "value.init_from": "policy"}


def texts() -> list[dict[str, str]]:
    return [{"text": word * 5} for word in ("abc", "de", "fgh", "a", "bcd")]


ONE_BASE = {
    "model.lora": LORA,
    "value": {"init_from": "reward", "activation_checkpointing": True},
    "reward.0.share_base": True,
}

# Each variant has several things at once that a trainer carries from step to step.
VARIANTS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "sft with dropout and tied embeddings": ("sft", {"model.config": GPT2_WITH_DROPOUT, "sft.dropout": True}),
    "sft of an adapter in bf16": ("sft", {"model.lora": LORA, "run.precision": "bf16"}),
    "reward with an adapter": ("reward", {"model.lora": LORA, "reward.loss": "divergence_window"}),
    "prm with dropout on the last steps": (
        "prm",
        {"model.config": GPT2_WITH_DROPOUT, "prm.dropout": True, "data.train_on": "last"},
    ),
    "dpo of an adapter": ("dpo", {"model.lora": LORA, "dpo.label_smoothing": 0.1}),
    "kto of an adapter": ("kto", {"model.lora": LORA, "kto.undesirable_weight": 2.0}),
    "ppo of adapters, with normalised values": (
        "ppo",
        {"model.lora": LORA, "value.lora": LORA, "ppo.value_loss.normalise": "cumulative"},
    ),
    "ppo of four roles on one base": ("ppo", ONE_BASE),
    "ppo without a critic, which samples further groups, KL in the loss": (
        "ppo",
        {
            **NO_CRITIC,
            "ppo.kl.kind": "loss",
            "ppo.kl.estimator": "k2",
            "ppo.advantage": {"kind": "group_centred", "zero_variance_groups": "resample", "resample_rounds": 2},
            "ppo.task_reward": "share_of_vowels",
        },
    ),
    "ppo from a teacher alone": (
        "ppo",
        {
            "reward": [],
            "reference": {"config": LLAMA | {"hidden_size": 32}},
            "value": {},
            "ppo.advantage": "return_to_go",
            "ppo.kl": {"kind": "loss", "estimator": "full", "coefficient": 1.0},
        },
    ),
    "ppo of pairs, whose beta adapts": (
        "ppo",
        {"ppo.policy_loss": {"objective": "online_dpo"}, "ppo.samples_per_prompt": 3, "ppo.minibatch_responses": 4},
    ),
    "ppo that samples a step ahead, with moments of scores, whose steps end early": (
        "ppo",
        {
            "ppo.rollout.staleness": 1,
            "ppo.score.normalise": "standardise",
            "ppo.score.whiten_rewards": "keep_mean",
            "ppo.kl.adaptive": None,
            "ppo.epochs_per_step": 2,
            "ppo.guards.target_kl": 1e-4,
        },
    ),
    "ppo with texts, returns of all steps before, and all that is drawn and compared": (
        "ppo",
        {
            **NORMALISED,
            "ppo.advantage.least_spread": 1.0,
            "ptx_data": {"sources": [{"function": "test_variants:texts"}], "layout": "blocks", "max_tokens": 9},
            "ppo.ptx": {"coefficient": 0.5, "examples_per_update": 3},
            "ppo.samples_per_prompt": 2,
            "ppo.rollout.random_limit_min": 1,
            "ppo.evaluate_reference": True,
            "ppo.evaluation_samples_per_prompt": 2,
            "ppo.solved_score": 0.5,
        },
    ),
    "ppo that leaves prompts out, with a critic of its own": (
        "ppo",
        {
            "data.filter": {"below": 0.05, "above": 0.3, "max_fraction": 0.4},
            **VOWELS,
            "ppo.prompts_per_step": 3,
            "ppo.kl.adaptive": None,
        },
    ),
    "ppo whose weights step in the backward": ("ppo", IN_BACKWARD),
    "ppo on a shared trunk whose head warms up": ("ppo", {"value.init_from": "trunk", **NORMALISED}),
    "ppo on a shared trunk with an adapter": (
        "ppo",
        {"value.init_from": "trunk", "model.lora": LORA, **ONE_OPTIMIZER},
    ),
    "ppo of a mixture of experts": (
        "ppo",
        {
            "model.config": LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "router_aux_loss_coef": 0.5},
            "model.balancing_coefficient": 0.5,
            "value.init_from": "policy",
        },
    ),
}

pytestmark = pytest.mark.usefixtures("no_report_no_fsync")


@pytest.mark.parametrize("name", VARIANTS)
def test_resuming_changes_nothing(name: str, tmp_path: Path) -> None:
    """From the first checkpoint with lines of a step to redo, and from the second with none."""
    kind, changes = VARIANTS[name]
    place = make_inputs(tmp_path)
    recipe = changed(recipe_of(kind, place), changes)
    with pytest.MonkeyPatch.context() as patch:
        camera = Camera(place / "run", patch.setattr)
        assert run(kind, recipe, AUTO) == 0
    expected = outcome(place / "run")
    for saved_step, logged_lines in ((2, 4), (4, 5)):
        picture = [p for p in camera if (p.saved_step, p.logged_lines) == (saved_step, logged_lines)][-1]
        picture.put_back(place / "run")
        assert run(kind, recipe, RunOptions(quiet=True, resume="must")) == 0
        assert_same_outcome(place / "run", expected, after=picture.moment)


def test_the_kl_coefficient_and_the_scale_of_the_values_differ_at_every_save(tmp_path: Path) -> None:
    """So that the runs above would show it, were one of them forgotten."""
    place = make_inputs(tmp_path)
    run("ppo", changed(recipe_of("ppo", place), {"ppo.value_loss.normalise": "exponential"}), AUTO)
    found = outcome(place / "run")
    for name in ("kl/coefficient", "value/scale"):
        assert len({found[f"metrics of step {step}"][name] for step in range(1, 6)}) == 5, name


def always_one(prompts: Sequence[Any], responses: Sequence[Any], metadata: Sequence[Any]) -> list[float]:
    return [1.0 for _ in responses]


def test_steps_of_equal_scores_are_counted_on_after_a_resume(tmp_path: Path) -> None:
    """Two of them before the checkpoint and one after it are three."""
    place = make_inputs(tmp_path)
    dead = {"reward": [{"kind": "function", "function": "test_variants:always_one"}], "value.init_from": "policy"}
    recipe = changed(recipe_of("ppo", place), dead | {"ppo.guards.max_constant_reward_steps": 3})
    for options in (AUTO, RunOptions(quiet=True, resume="must")):
        with pytest.raises(TrainingError, match="step 3: all scores of 3 steps in a row are 1"):
            run("ppo", recipe, options)
        assert (place / "run" / "checkpoints" / "latest").read_text() == "step-000002\n"


@pytest.mark.parametrize("kind", ["sft", "ppo"])
def test_a_signal_saves_and_the_resumed_run_has_the_same_bits_and_the_same_best(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_inputs(tmp_path)
    recipe = changed(recipe_of(kind, place), {"run.evaluate_every_steps": 1})
    run(kind, recipe, AUTO)
    expected = outcome(place / "run")
    with monkeypatch.context() as patch:
        signal_after_line(patch, "metrics.jsonl", step=1)
        assert run(kind, recipe, RunOptions(quiet=True, overwrite=True)) == 143
    assert (place / "run" / "checkpoints" / "latest").read_text() == "step-000001\n"
    assert run(kind, recipe, RunOptions(quiet=True, resume="must")) == 0
    assert_same_outcome(place / "run", expected, after="SIGTERM in step 1")


def signal_after_line(patch: pytest.MonkeyPatch, log: str, *, step: int) -> None:
    """Send this process a SIGTERM when the line of a step is written."""
    really = JsonLines.append

    def append(self: JsonLines, record: Mapping[str, Any]) -> None:
        really(self, record)
        if record["step"] == step and Path(self._file.name).name == log:
            os.kill(os.getpid(), signal.SIGTERM)

    patch.setattr(JsonLines, "append", append)
