"""SFT and reward training: the loss is what it says, and both learn. What holds for every task: test_every_task.py."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import tiny_language_model
from proximo.models.language import LanguageModel
from proximo.models.packing import pack
from proximo.supervised.reward_recipe import RewardRecipe
from proximo.supervised.reward_trainer import build_task as build_reward_task
from proximo.supervised.reward_trainer import pair_sequences
from proximo.supervised.sft_recipe import SFTConfig
from proximo.supervised.sft_trainer import SFTTask
from proximo.supervised.task import MAX_CONSECUTIVE_SKIPS
from proximo.trainer_kinds import TrainerKind, recipe_kind, trainer_kinds
from supervised.tiny_tasks import examples, pairs, reward_task, sft_task, task_inputs
from tiny_runs import KINDS, LLAMA, Kind, changed, make_inputs, recipe_of


def test_the_sft_loss_is_the_mean_over_counted_tokens_of_the_models_own_log_likelihood() -> None:
    task = sft_task()
    plain = tiny_language_model()
    nats, count = 0.0, 0
    for example in examples():
        logits = plain(torch.tensor([example.token_ids])).logits[0].log_softmax(-1)
        for position, counts in enumerate(example.loss_mask):
            if counts:
                nats -= logits[position - 1, example.token_ids[position]].item()
                count += 1
    record = task.evaluate()
    assert record.metrics["evaluation/loss"].value == pytest.approx(nats / count, rel=1e-5)
    assert record.metrics["evaluation/bits_per_character"].value == pytest.approx(nats / math.log(2) / 10, rel=1e-5)
    update = sft_task(tokens_per_microbatch=13).step(1).metrics
    assert update["sft/loss"].value == pytest.approx(nats / count, rel=1e-5), "in several micro-batches"
    assert update["sft/tokens"].value == count


def test_the_score_of_an_answer_is_read_at_its_last_token() -> None:
    task = reward_task()
    record = task.evaluate()
    for pair, sample in zip(pairs(), record.samples, strict=True):
        for ids, key in zip(pair_sequences(pair), ("score_chosen", "score_rejected"), strict=True):
            alone = task.model.token_scores(pack([ids]))[-1].item()
            assert sample[key] == pytest.approx(alone, abs=1e-5)


@pytest.mark.soak
def test_sft_learns_its_examples() -> None:
    task = sft_task(num_epochs=60)
    first = task.evaluate()
    for step in range(1, 61):
        task.step(step)
    last = task.evaluate()
    assert last.metrics["evaluation/loss"].value < 0.3 * first.metrics["evaluation/loss"].value


@pytest.mark.soak
@pytest.mark.parametrize("loss", ["bradley_terry", "divergence_window"])
def test_a_reward_model_learns_to_tell_the_pairs_apart(loss: str) -> None:
    task = reward_task(loss=loss)
    for step in range(1, 21):
        task.step(step)
    record = task.evaluate()
    assert record.metrics["evaluation/pair_accuracy"].value == 1.0
    assert record.metrics["evaluation/margin_mean"].value > 0.5


def test_the_number_of_steps_covers_the_epochs() -> None:
    assert sft_task(num_epochs=1.0, examples_per_step=4).num_steps == 2
    assert sft_task(num_epochs=0.5, examples_per_step=3).num_steps == 1
    assert reward_task(num_epochs=2.0, pairs_per_step=4).num_steps == 3


def test_dropout_in_sft_depends_on_the_step_alone() -> None:
    def run(steps: list[int]) -> torch.Tensor:
        model = tiny_language_model(attention_dropout=0.5)
        config = SFTConfig(num_epochs=3, examples_per_step=6, dropout=True, optimizer={"learning_rate": 0.1})
        task = SFTTask(task_inputs(LanguageModel(model), examples(), [], config))
        torch.rand(3)
        for step in steps:
            task.step(step)
        return model.lm_head.weight.detach().clone()

    assert torch.equal(run([1, 2]), run([1, 2]))
    assert not torch.equal(run([1, 1]), run([1, 2]))


@pytest.mark.parametrize(("warmup", "noted"), [(1, False), (2, True)])
def test_a_warm_up_that_the_run_does_not_outlast_is_noted(warmup: int, noted: bool) -> None:
    optimizer = {"learning_rate": 1e-2, "warmup_updates": warmup}
    task = sft_task(num_epochs=2, examples_per_step=6, optimizer=optimizer)
    assert task.num_steps == 2
    assert ("the policy model never reaches its peak" in " ".join(task.notes)) == noted


@pytest.mark.parametrize(
    ("epochs", "size", "said"),
    [
        (1, 6, None),
        (2, 4, None),
        (0.5, 3, None),
        (1, 4, "the last step is filled up with 2 rows of the next pass over the data"),
        (1.5, 2, "the last step is filled up with 1 row of the next pass over the data"),
        (1, 16, "the data hold 6 rows, and each of a step's 16 rows is one of them"),
    ],
)
def test_rows_that_are_read_again_to_fill_a_step_are_noted_once(epochs: float, size: int, said: str | None) -> None:
    task = sft_task(num_epochs=epochs, examples_per_step=size)
    assert len(task.examples) == 6
    assert [note for note in task.notes if "row" in note] == ([] if said is None else [said])


@pytest.mark.parametrize(("loss", "noted"), [("bradley_terry", False), ("divergence_window", True)])
def test_margins_that_the_loss_has_no_place_for_are_noted(loss: str, noted: bool, tmp_path: Path) -> None:
    place = make_inputs(tmp_path)
    row = {"prompt": "ab", "chosen": "cd", "rejected": "ef", "margin": 0.5}
    (place / "pairs.jsonl").write_text("".join(json.dumps({**row, "prompt": "ab" * n}) + "\n" for n in range(1, 5)))
    recipe = changed(recipe_of("reward", place), {"reward.loss": loss})
    task = build_reward_task(RewardRecipe.model_validate(recipe))
    assert ("the margins of 3 pairs are not used" in " ".join(task.notes)) == noted


def test_a_model_that_a_learning_rate_destroyed_ends_the_run_after_some_skipped_updates():
    task = sft_task(optimizer={"learning_rate": 1e30})
    task.step(1)
    for step in range(2, 1 + MAX_CONSECUTIVE_SKIPS):
        record = task.step(step)
        assert record.metrics["sft/skipped_updates"].value == 1
        assert record.guard is None
    assert task.state()["num_skipped_in_a_row"] == MAX_CONSECUTIVE_SKIPS - 1
    guard = task.step(1 + MAX_CONSECUTIVE_SKIPS).guard
    assert guard is not None
    assert re.search(r"8 updates in a row were skipped.*learning rate .* may be too high.*--resume keeps it", guard)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_are_not_used_are_named_for_all_sources(kind: Kind, tmp_path: Path) -> None:
    place = make_inputs(tmp_path)
    recipe = recipe_of(kind, place)
    (source,) = recipe["data"]["sources"]
    rows = [json.loads(line) for line in Path(source["path"]).read_text().splitlines()]
    other = place / "other.jsonl"
    other.write_text("".join(json.dumps(row | {"level": 3}) + "\n" for row in rows))
    sources = [{"path": str(other)}]
    changes = {"data.sources": sources, "data.evaluation_sources": sources, "data.held_out_rows": 0}
    (trainer,) = [each for each in trainer_kinds() if each.name == kind]
    made = trainer.build(trainer.schema.model_validate(changed(recipe, changes)))
    unused = f"{other}: columns not used: 'level' ({len(rows)} rows)"
    named = [note for note in made.notes if unused in note]
    assert len(named) == (0 if kind == "ppo" else 2)
    assert any(note.startswith("evaluation rows: ") for note in made.notes)


@pytest.mark.parametrize("kind", ["sft", "reward", "prm"])
@pytest.mark.parametrize("dropout", [True, False])
def test_dropout_of_the_model_is_left_in_it_only_where_the_recipe_asks_for_it(
    kind: Kind, dropout: bool, tmp_path: Path
) -> None:
    place = make_inputs(tmp_path)
    config = LLAMA | {"attention_dropout": 0.5}
    recipe = changed(recipe_of(kind, place), {"model.config": config, f"{kind}.dropout": dropout})
    trainer = recipe_kind(kind)
    assert isinstance(trainer, TrainerKind)
    task: Any = trainer.build(trainer.schema.model_validate(recipe))
    assert task.model.base.config.attention_dropout == (0.5 if dropout else 0)
