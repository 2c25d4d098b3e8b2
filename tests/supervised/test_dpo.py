"""DPO: its loss is what it says, and it learns. What holds for every task: test_every_task.py."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from builders import tiny_language_model
from ppo.test_updates import worst_difference
from proximo.data.preferences import PreferencePair
from proximo.errors import ConfigError, DataError, ModelError
from proximo.models.language import LanguageModel
from proximo.run.task import Record
from proximo.supervised.dpo_recipe import DPORecipe
from proximo.supervised.dpo_trainer import build_task
from proximo.supervised.reward_trainer import pair_sequences
from supervised.tiny_tasks import BETA, dpo_task, first_update, pairs, two_models
from tiny_runs import changed, make_inputs, recipe_of


def gradients_of(plain: PreTrainedModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    loss.backward()
    return {name: tensor.grad for name, tensor in plain.named_parameters() if tensor.grad is not None}


def plain_models() -> tuple[PreTrainedModel, ...]:
    return tuple(tiny_language_model(seed=seed, dtype=torch.float64) for seed in (1, 2))


def plain_logprob(
    model: PreTrainedModel, sequence: tuple[int, ...], num_prompt: int, mask: tuple[bool, ...] | None = None
) -> torch.Tensor:
    """Of an answer, token by token from transformers' own logits; of those that `mask` counts."""
    logprobs = model(torch.tensor([sequence])).logits[0].log_softmax(-1)
    counted = [position for position in range(num_prompt, len(sequence)) if mask is None or mask[position - num_prompt]]
    return sum(
        (logprobs[position - 1, sequence[position]] for position in counted),
        start=torch.zeros((), dtype=logprobs.dtype),
    )


def plain_loss(
    policy: PreTrainedModel, reference: PreTrainedModel, data: list[PreferencePair], smoothing: float | None
) -> tuple[torch.Tensor, Any]:
    """The mean over the pairs, one sequence at a time (of IPO, without a smoothing); rewards and log-probs of each.

    Log-ratios are sums over whole answers, as in the papers, not means over tokens.
    """
    total, seen = torch.zeros((), dtype=torch.float64), []
    for pair in data:
        answers = list(zip(pair_sequences(pair), (pair.chosen_mask, pair.rejected_mask), strict=True))
        start = len(pair.prompt_token_ids)
        logprobs = [plain_logprob(policy, sequence, start, mask) for sequence, mask in answers]
        with torch.no_grad():
            wanted = [plain_logprob(reference, sequence, start, mask) for sequence, mask in answers]
        rewards = [BETA * (mine - theirs) for mine, theirs in zip(logprobs, wanted, strict=True)]
        right = torch.sigmoid(rewards[0] - rewards[1])
        if smoothing is None:
            total = total + ((rewards[0] - rewards[1]) / BETA - 0.5 / BETA) ** 2
        else:
            total = total - (1 - smoothing) * right.log() - smoothing * (1 - right).log()
        seen.append(([each.item() for each in rewards], [each.item() for each in logprobs]))
    return total / len(seen), seen


def masked_pairs() -> list[PreferencePair]:
    """Some answers count whole, of others the first and the last token do not, or the second."""
    made = pairs()
    for number in (0, 3):
        ids = made[number].chosen_token_ids
        made[number] = replace(made[number], chosen_mask=(False, *[True] * (len(ids) - 2), False))
    ids = made[3].rejected_token_ids
    made[3] = replace(made[3], rejected_mask=(True, False, *[True] * (len(ids) - 2)))
    return made


@pytest.mark.parametrize(
    ("data", "smoothing", "budget"),
    [(pairs, 0.0, 8192), (pairs, 0.1, 8192), (pairs, None, 8192), (masked_pairs, 0.0, 8192), (masked_pairs, 0.0, 20)],
    ids=["plain", "smoothed", "ipo", "tokens that no assistant wrote", "the same in several micro-batches"],
)
def test_loss_metrics_and_gradient_are_those_of_one_sequence_at_a_time(
    data: Callable[[], list[PreferencePair]], smoothing: float | None, budget: int
) -> None:
    plain, plain_reference = plain_models()
    loss, seen = plain_loss(plain, plain_reference, data(), smoothing)
    kind = {"loss": "ipo"} if smoothing is None else {"label_smoothing": smoothing}
    made = dpo_task(*two_models(), data(), tokens_per_microbatch=budget, **kind)
    metrics, found = first_update(made)
    assert metrics["dpo/loss"] == pytest.approx(loss.item(), rel=1e-9)
    assert worst_difference(gradients_of(plain, loss), found) < 1e-9
    number = len(seen)
    for answer, name in enumerate(("chosen", "rejected")):
        rewards = [rewards[answer] for rewards, _ in seen]
        logprobs = [logprobs[answer] for _, logprobs in seen]
        assert metrics[f"dpo/reward_{name}"] == pytest.approx(sum(rewards) / number, rel=1e-9)
        assert metrics[f"dpo/logprob_{name}"] == pytest.approx(sum(logprobs) / number, rel=1e-9)
    gaps = [rewards[0] - rewards[1] for rewards, _ in seen]
    assert metrics["dpo/margin"] == pytest.approx(sum(gaps) / number, rel=1e-9)
    assert metrics["dpo/accuracy"] == sum(gap > 0 for gap in gaps) / number
    record = made.evaluate()
    assert record.metrics["evaluation/loss"].value == pytest.approx(loss.item(), rel=1e-9)
    assert record.metrics["evaluation/margin_mean"].value == pytest.approx(metrics["dpo/margin"], rel=1e-9)
    assert record.metrics["evaluation/logprob_chosen"].value == pytest.approx(metrics["dpo/logprob_chosen"], rel=1e-9)
    for sample, (rewards, _) in zip(record.samples, seen, strict=True):
        assert [sample["score_chosen"], sample["score_rejected"]] == pytest.approx(rewards, rel=1e-9)


def test_before_the_first_step_policy_and_reference_are_one(tmp_path: Path) -> None:
    made = build_task(DPORecipe.model_validate(recipe_of("dpo", make_inputs(tmp_path))))
    record = made.evaluate()
    assert record.metrics["evaluation/loss"].value == pytest.approx(math.log(2), abs=1e-7)
    assert record.metrics["evaluation/margin_mean"].value == pytest.approx(0, abs=1e-7)


def trained(steps: int, *, on_training_pairs: bool = False, **config: Any) -> Record:
    """The evaluation on pairs of the same rule that no step has seen, or on those that it learned from."""
    model = LanguageModel(tiny_language_model())
    data = pairs(24)
    made = dpo_task(
        model,
        model.frozen_copy(),
        data[:16],
        data[:16] if on_training_pairs else data[16:],
        **{"pairs_per_step": 16, **config},
    )
    for step in range(1, steps + 1):
        made.step(step)
    record = made.evaluate()
    assert record is not None
    return record


@pytest.mark.soak
def test_it_learns_to_tell_held_out_pairs_apart() -> None:
    before, after = trained(0).metrics, trained(20).metrics
    assert before["evaluation/pair_accuracy"].value == 0.5
    assert after["evaluation/pair_accuracy"].value == 1.0
    assert after["evaluation/loss"].value < 0.4
    fell = {name: after[name].value - before[name].value for name in before if "logprob" in name}
    assert fell["evaluation/logprob_chosen"] > fell["evaluation/logprob_rejected"]


@pytest.mark.soak
def test_label_smoothing_holds_the_margin_back() -> None:
    """Its optimum is log(0.7 / 0.3) = 0.85; without it the margin has none."""
    smoothed, plain = (
        trained(20, on_training_pairs=True, label_smoothing=share).metrics["evaluation/margin_mean"].value
        for share in (0.3, 0.0)
    )
    assert plain > 2.0
    assert smoothed == pytest.approx(math.log(0.7 / 0.3), abs=0.2)


@pytest.mark.soak
def test_ipo_draws_the_margin_to_one_half() -> None:
    """h goes to 1 / (2 beta) whatever beta is, so the margin of implicit rewards, beta h, goes to 0.5."""
    start, after = (trained(steps, on_training_pairs=True, loss="ipo").metrics for steps in (0, 40))
    assert start["evaluation/loss"].value == pytest.approx(1 / (4 * BETA**2), rel=1e-5)
    assert after["evaluation/margin_mean"].value == pytest.approx(0.5, abs=0.1)
    assert after["evaluation/pair_accuracy"].value == 1.0


def recipe(place: Path, **changes: Any) -> DPORecipe:
    return DPORecipe.model_validate(changed(recipe_of("dpo", place), changes))


def test_pairs_without_anything_before_their_answers_are_refused(tmp_path: Path) -> None:
    place = make_inputs(tmp_path)
    lines = [{"prompt": "", "chosen": chosen, "rejected": "cd"} for chosen in ("ab", "a", "b")]
    (place / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DataError, match=r"3 of 3 pairs have no prompt, the first of them .*give the rows a prompt"):
        build_task(recipe(place, **{"data.held_out_rows": 1}))


def test_margins_are_noted_as_unused(tmp_path: Path) -> None:
    place = make_inputs(tmp_path)
    row = {"chosen": "cd", "rejected": "ef", "margin": 0.5}
    (place / "pairs.jsonl").write_text("".join(json.dumps({**row, "prompt": "ab" * n}) + "\n" for n in range(1, 5)))
    assert "the margins of 3 pairs are not used" in " ".join(build_task(recipe(place)).notes)


def test_answers_longer_than_the_model_can_read_are_refused_before_training(tmp_path: Path) -> None:
    place = make_inputs(tmp_path)
    short = {"model_type": "gpt2", "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    with pytest.raises(ConfigError, match="policy"):
        build_task(recipe(place, **{"model.config": short}))


def test_another_reference_is_read_frozen_and_needs_the_same_vocabulary(tmp_path: Path) -> None:
    place = make_inputs(tmp_path)
    made = build_task(recipe(place, **{"reference": {"path": str(place / "language_model")}}))
    assert not any(weight.requires_grad for weight in made.reference.model.parameters())
    record = made.evaluate()
    assert record.metrics["evaluation/margin_mean"].value != 0
    written = json.loads((place / "language_model" / "tokenizer.json").read_text())
    vocabulary = written["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (place / "language_model" / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(ModelError, match="reference"):
        build_task(recipe(place, **{"reference": {"path": str(place / "language_model")}}))
