"""The guard on the mismatch of engine and learner: weights changed behind a server's back, and healthy runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_vllm_engine import length, run, trained

from builders import tiny_language_model, tiny_tokenizer
from fake_vllm import GENERATE, FakeVLLM
from proximo.algorithms.behaviour import unexplained_difference
from proximo.config.ppo.options import PPOConfig
from proximo.errors import GuardError
from proximo.models.language import LanguageModel
from proximo.models.precision.placement import Precision
from proximo.ppo.roles.sampler import RolloutsAhead, SamplerGuard
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Response
from proximo.run.options import RunOptions
from records_made import response
from tiny_runs import changed, make_inputs, recipe_of
from tiny_runs import run as run_recipe

PROMPTS = ["ab", "cde", "f", "gh", "ijk", "l", "mn"]


def count_a(prompts: Sequence[str], responses: Sequence[str], metadata: Any) -> list[float]:
    return [float(text.count("a")) for text in responses]


class Changed:
    """Other weights in the server after a push, once its canaries are sampled. The server's word on them stays."""

    def __init__(self, *, push: int) -> None:
        self.push = push
        self.sampled = 0

    def __call__(self, fake: FakeVLLM, path: str, body: Mapping[str, Any]) -> None:
        if path == "/update_weights":
            self.push -= 1
            self.sampled = 0
        self.sampled += path == GENERATE
        if self.push == 0 and self.sampled == 5:
            with torch.no_grad():
                fake.base.model.get_parameter("lm_head.weight").normal_(std=1.0, generator=torch.manual_seed(2))


@pytest.mark.parametrize("staleness", [0, 1])
def test_weights_changed_behind_a_servers_back_end_the_run_before_anything_is_trained_on_them(staleness: int) -> None:
    trainer, fake = trained(fault=Changed(push=2), staleness=staleness)
    with pytest.raises(GuardError, match=r"more than ppo\.guards\.max_mismatch = 0\.2 allows.*somebody else changed"):
        run(trainer)
    learned = trainer.state.steps_done
    assert learned == 1 + staleness, "the step whose responses they made is not taken"
    assert trainer.policy_version == 2 * learned
    assert fake.version.startswith("proximo-2-") or staleness


def test_without_the_guard_they_train(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = trained(fault=Changed(push=2))
    monkeypatch.setattr(trainer.roles.policy, "sampler_guard", SamplerGuard(None, None))
    lines = run(trainer)
    assert [line["mismatch/unexplained"] > 0.2 for line in lines] == [False, True, False]


def of(staleness: int, *, rate: float, precision: Precision = Precision.FLOAT32, steps: int = 8) -> list[Any]:
    config = PPOConfig(
        num_steps=steps,
        prompts_per_step=8,
        responses_per_prompt=2,
        epochs_per_step=1,
        rollout={"max_new_tokens": 8, "staleness": staleness},
        policy_optimizer={"learning_rate": rate},
        kl="none",
    )
    policy = LanguageModel(tiny_language_model(), precision=precision)
    return PPOTrainer(policy, tiny_tokenizer(), config=config).train(PROMPTS, reward=count_a)


@pytest.mark.parametrize(("staleness", "rate"), [(1, 3e-2), (2, 1e-3), (4, 3e-2)])
def test_no_healthy_asynchronous_run_is_stopped_however_fast_its_policy_moves(staleness: int, rate: float) -> None:
    """Where it moves fast, its own movement is far beyond the limit that holds for tokens of the current weights."""
    lines = of(staleness, rate=rate)
    assert len(lines) == 8
    assert max(line["mismatch/unexplained"] for line in lines) < 0.02
    moved = [line["staleness/movement"] for line in lines]
    assert all(moved)
    assert (max(moved) > 0.2) == (rate > 1e-2)


@pytest.mark.parametrize("staleness", [0, 1])
def test_no_healthy_run_in_bf16_is_stopped(staleness: int) -> None:
    lines = of(staleness, rate=1e-3, precision=Precision.BF16, steps=4)
    assert 0 <= max(line["mismatch/unexplained"] for line in lines) < 0.05


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_no_healthy_run_with_a_server_is_stopped(staleness: int) -> None:
    trainer, _ = trained(staleness=staleness)
    lines = trainer.train(["ab", "cde", "f", "gh"], reward=length)
    assert max(line["mismatch/unexplained"] for line in lines) < 1e-4
    if staleness:
        assert [line["staleness/max_steps"] for line in lines] == [0, 1, staleness]


def test_a_float32_run_whose_sampler_is_the_learner_compares_nothing() -> None:
    assert not any("mismatch/unexplained" in line for line in of(0, rate=1e-3, steps=1))


def test_what_staleness_explains_counts_twice_and_the_rest_is_a_mean_of_absolute_values() -> None:
    sampled, learner = torch.tensor([-1.0, -2.0, -3.0, torch.nan]), torch.tensor([-1.5, -1.0, -3.0, 0.0])
    mask, movement = torch.tensor([True, True, True, False]), torch.tensor([0.0, 0.1, 0.2, torch.nan])
    expected = ((0.5 - 0) + (1.0 - 0.2) + (0.0 - 0.4)) / 3
    assert unexplained_difference(sampled, learner, mask, movement) == pytest.approx(expected)
    assert unexplained_difference(sampled, learner, mask, 9 * torch.ones(4)) == 0
    assert unexplained_difference(sampled, learner, ~mask & mask, movement) is None


def drawn_by(version: int, *, versions: tuple[int, ...] | None = None) -> Response:
    return replace(response(token_ids=(5, 6, 7, 8)), policy_version=version, token_versions=versions)


def test_tokens_of_weights_that_nothing_is_known_of_are_not_compared() -> None:
    guard = SamplerGuard(0.2, None)
    guard.check([drawn_by(3), drawn_by(2)], torch.cat([drawn_by(3).logprobs, drawn_by(3).logprobs - 9]), version=3)
    assert guard.unexplained == 0
    guard.check([drawn_by(2)], drawn_by(2).logprobs - 9, version=3)
    assert guard.unexplained is None


def test_a_run_in_which_nothing_can_be_compared_is_told() -> None:
    guard, drawn = SamplerGuard(0.2, None), drawn_by(3)
    unknown = replace(drawn, logprobs=torch.full_like(drawn.logprobs, torch.nan))
    with pytest.warns(UserWarning, match=r"ppo\.guards\.max_mismatch compares nothing"):
        guard.check([unknown], drawn.logprobs, version=3)
    assert guard.unexplained is None


def test_log_probs_of_a_learner_that_are_no_numbers_are_not_taken_for_equal() -> None:
    guard, drawn = SamplerGuard(0.2, None), drawn_by(3)
    guard.check([drawn], torch.full_like(drawn.logprobs, torch.nan), version=3)
    assert guard.unexplained is None


def test_the_movement_since_a_version_is_the_sum_of_that_of_the_steps_since() -> None:
    config = PPOConfig(num_steps=6, prompts_per_step=4, rollout={"max_new_tokens": 4, "staleness": 3})
    ahead = PPOTrainer(LanguageModel(tiny_language_model()), tiny_tokenizer(), config=config).roles.policy.ahead
    assert isinstance(ahead, RolloutsAhead)
    ahead._step_of = {0: 0, 8: 1, 16: 2}
    ahead.moved(8, 0.5)
    ahead.moved(8, 0.7)
    ahead._moved = {8: 0.5, 16: 0.25}
    of_tokens = ahead.movement([drawn_by(0, versions=(0, 8, 16, 16))], version=16)
    assert of_tokens.tolist() == [0.75, 0.25, 0, 0]
    ahead._moved = {16: 0.25}  # as after a resume from a checkpoint that lacks it
    assert ahead.movement([drawn_by(0)], version=16).isnan().all()


def test_a_run_that_it_ends_is_saved_and_keeps_nothing_that_was_sampled_ahead(tmp_path: Path) -> None:
    """So that the resumed run samples them again, with weights that it pushes."""
    place = make_inputs(tmp_path)
    recipe = changed(recipe_of("ppo", place), {"ppo.rollout.staleness": 2, "run.save_every_steps": 100})
    really = SamplerGuard.check

    def fails_in_step_3(self: SamplerGuard, responses: Any, logprobs: torch.Tensor, *, version: int) -> None:
        really(self, responses, logprobs - (9.0 if version >= 4 else 0.0), version=version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SamplerGuard, "check", fails_in_step_3)
        with pytest.raises(Exception, match="beyond what ppo.rollout.staleness explains"):
            run_recipe("ppo", recipe, RunOptions(quiet=True))
    saved = place / "run" / "checkpoints" / "step-000002"
    steps_kept, _, _ = (saved / "rollouts").read_bytes().partition(b"\n")
    assert json.loads(steps_kept) == []
    assert run_recipe("ppo", recipe, RunOptions(quiet=True, resume="must")) == 0
