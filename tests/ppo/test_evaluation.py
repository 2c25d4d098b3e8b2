"""Evaluations with several responses to a prompt, a score that solves it, and the reference's answers beside them."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import tiny_language_model
from ppo_trainers import lengths, ppo_trainer
from proximo.cli import main
from proximo.errors import TrainingError
from proximo.metrics.run_files import read_run
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions, add_adapter
from proximo.ppo.step_arguments import as_prompts
from proximo.ppo.task import Evaluation, evaluate_policy, pass_at_k
from proximo.ppo.trainer import PPOTrainer
from proximo.rewards.function import FunctionReward
from proximo.run.options import RunOptions
from tiny_runs import changed, make_inputs, recipe_of, run

PROMPTS = ["ab", "cde", "f"]


trainer = partial(ppo_trainer, num_steps=1, prompts_per_step=3, rollout={"max_new_tokens": 5})


def evaluate(made: PPOTrainer, reward: Any) -> Evaluation:
    source = FunctionReward(reward)
    prompts = as_prompts(made.tokenizer, PROMPTS)
    return evaluate_policy(made.roles, prompts, reward=source, config=made.config, seed=0)


def value(found: Evaluation, name: str) -> float:
    return found.metrics[f"evaluation/{name}"].value  # type: ignore[attr-defined]


def by_place(*scores: float | None) -> Any:
    """A reward that looks at nothing but the place of a response in the batch."""
    return lambda prompts, responses, metadata: list(scores)


def test_pass_at_k_is_the_mean_over_prompts_of_the_samples_that_have_a_score() -> None:
    made = trainer(evaluation_samples_per_prompt=5, solved_score=1.0)
    found = evaluate(made, by_place(1, 0, 0, 0, 0, 2, 1, 0.9, None, None, 0, 0, 0, 0, 0))
    assert len(found.scored) == 15
    assert len({r.response.token_ids for r in found.scored[:5]}) > 1
    assert value(found, "pass_at_1") == pytest.approx((1 / 5 + 2 / 3 + 0) / 3)
    assert value(found, "pass_at_2") == pytest.approx((2 / 5 + 1 + 0) / 3)
    assert value(found, "pass_at_4") == pytest.approx((4 / 5 + 0) / 2), "three samples say nothing of four"
    assert value(found, "pass_at_5") == pytest.approx((1 + 0) / 2)
    assert pass_at_k(5, 1, 4) == pytest.approx(4 / 5)
    assert [name for name in found.metrics if "pass" in name] == [f"evaluation/pass_at_{k}" for k in (1, 2, 4, 5)]
    assert not any("pass" in name for name in evaluate(trainer(), lengths).metrics)


def test_the_first_sample_of_several_is_the_one_that_stands_alone() -> None:
    alone, several = evaluate(trainer(), lengths), evaluate(trainer(evaluation_samples_per_prompt=3), lengths)
    assert [s.response.token_ids for s in several.scored[::3]] == [s.response.token_ids for s in alone.scored]


def test_at_the_start_the_policy_draws_with_the_reference_and_later_it_may_win() -> None:
    made = trainer(evaluate_reference=True)
    found = evaluate(made, lengths)
    assert value(found, "win_rate") == 0.5
    assert [s.response.token_ids for s in found.reference if s] == [s.response.token_ids for s in found.scored]
    with torch.no_grad():
        for weight in made.policy.model.parameters():
            weight.add_(0.5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
    moved = evaluate(made, lengths)
    assert [s.response.token_ids for s in moved.reference if s] == [s.response.token_ids for s in found.scored]
    pairs = [(a.score, b.score) for a, b in zip(moved.scored, found.scored, strict=True)]
    assert len(set(pairs)) > 1
    assert value(moved, "win_rate") == sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / 3
    assert value(moved, "reference_score") == pytest.approx(sum(b for _, b in pairs) / 3)


def test_with_an_adapter_the_base_is_asked_and_the_adapter_is_on_again_afterwards() -> None:
    adapted = add_adapter(tiny_language_model(), LoRAOptions(rank=2, alpha=16))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.5, generator=torch.Generator().manual_seed(0))
    found = evaluate(trainer(LanguageModel(adapted), evaluate_reference=True), lengths)
    plain = evaluate(trainer(), lengths)
    assert [s.response.token_ids for s in found.reference if s] == [s.response.token_ids for s in plain.scored]
    assert [s.response.token_ids for s in found.scored] != [s.response.token_ids for s in plain.scored]
    again = evaluate(trainer(LanguageModel(adapted)), lengths)
    assert [s.response.token_ids for s in again.scored] == [s.response.token_ids for s in found.scored]


def test_what_could_not_be_scored_is_in_no_pair() -> None:
    made = trainer(evaluate_reference=True, guards={"max_unscored_fraction": 0.5})
    calls = iter([(2.0, None, 1.0), (1.0, 1.0, 1.0)])
    found = evaluate(made, lambda prompts, responses, metadata: list(next(calls)))
    assert value(found, "win_rate") == 0.75
    assert value(found, "reference_score") == 1.0


def test_too_few_scores_choose_no_best_checkpoint() -> None:
    wanted = "evaluation: 2 of 3 responses could not be scored, more than ppo.guards.max_unscored_fraction = 0.2"
    with pytest.raises(TrainingError, match=wanted):
        evaluate(trainer(), by_place(None, 1.0, None))
    calls = iter([(2.0, 1.0, 1.0), (1.0, None, 1.0)])
    with pytest.raises(TrainingError, match="evaluation, the reference's answers: 1 of 3 responses"):
        evaluate(trainer(evaluate_reference=True), lambda prompts, responses, metadata: list(next(calls)))


@pytest.mark.parametrize("score", [1e300, -1e19])
def test_a_score_that_float32_cannot_compute_with_is_named(score: float) -> None:
    made = trainer(score={"normalise": "standardise"})
    reward = by_place(score, 1.0, 2.0)
    with pytest.raises(TrainingError, match=r"evaluation: a response was scored -?1e\+.*beyond 1e\+18"):
        evaluate(made, reward)


def test_a_run_writes_the_references_answers_and_is_evaluated_again_with_more_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = make_inputs(tmp_path)
    changes = {"ppo.evaluate_reference": True, "ppo.num_steps": 1, "run.save_every_steps": None}
    recipe = changed(recipe_of("ppo", place), changes)
    assert run("ppo", recipe, RunOptions(quiet=True)) == 0
    first = read_run(place / "run").samples.first_evaluation
    assert [each.reference_response for each in first] == [each.response for each in first]
    assert [each.reference_score for each in first] == [each.score for each in first]
    assert "The reference: <b>" in (place / "run" / "report.html").read_text()

    asked = ["--samples-per-prompt", "3", "--solved-score", "-100", "--output", str(place / "out.jsonl")]
    assert main(["evaluate", str(place / "run"), *asked]) == 0
    assert "evaluation/pass_at_3" in capsys.readouterr().out
    samples = [json.loads(line) for line in (place / "out.jsonl").read_text().splitlines()]
    assert len(samples) == 6
    assert len({each["prompt_id"] for each in samples}) == 2
    greedy = []
    for name in ("a.jsonl", "b.jsonl"):
        assert main(["evaluate", str(place / "run"), "--greedy", "--output", str(place / name)]) == 0
        greedy.append((place / name).read_text(encoding="utf-8"))
    assert greedy[0] == greedy[1]
    drawn = [each["response"] for each in samples]
    assert [json.loads(line)["response"] for line in greedy[0].splitlines()] != drawn[::3]
