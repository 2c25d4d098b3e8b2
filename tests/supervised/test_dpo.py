"""DPO: its loss is what it says, nothing about the cut or the reference's form changes it, and it learns."""

import copy
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
from ppo.test_updates import Gathered, worst_difference
from proximo.data.preferences import PreferencePair
from proximo.errors import ConfigError, DataError, ModelError
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.sharing import base_alone, is_shared
from proximo.run.task import Record
from proximo.supervised.dpo_recipe import DPOConfig, DPORecipe
from proximo.supervised.dpo_trainer import DPOTask, build_task
from proximo.supervised.reward_trainer import pair_sequences
from proximo.supervised.task import SupervisedTask
from supervised.test_supervised import pairs, task_inputs
from tiny_runs import LORA, changed, make_inputs, recipe_of

BETA = 0.4


def task(
    model: LanguageModel,
    reference: LanguageModel | None,
    data: list[PreferencePair] | None = None,
    held_out: list[PreferencePair] | None = None,
    **config: Any,
) -> DPOTask:
    options = {"pairs_per_step": 6, "beta": BETA, "optimizer": {"learning_rate": 1e-2}, "num_epochs": 40} | config
    data = data or pairs()
    inputs = task_inputs(model, data, data if held_out is None else held_out, DPOConfig(**options))
    return DPOTask(inputs, reference=reference)


def two_models(dtype: torch.dtype = torch.float64) -> tuple[LanguageModel, LanguageModel]:
    """A policy that has left its reference."""
    return (
        LanguageModel(tiny_language_model(seed=1, dtype=dtype)),
        LanguageModel(tiny_language_model(seed=2, dtype=dtype).requires_grad_(False)),
    )


def first_update(made: DPOTask) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Metrics and gradient."""
    made.learners["policy"] = gathered = Gathered(made.model.model)
    metrics = {name: metric.value for name, metric in made.step(1).metrics.items()}
    return metrics, gathered.gradients[0]


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
    policy: PreTrainedModel, reference: PreTrainedModel, smoothing: float | None
) -> tuple[torch.Tensor, Any]:
    """The mean over the pairs, one sequence at a time (of IPO, without a smoothing); rewards and log-probs of each.

    Log-ratios are sums over whole answers, as in the papers, not means over tokens.
    """
    total, seen = torch.zeros((), dtype=torch.float64), []
    for pair in pairs():
        start = len(pair.prompt_token_ids)
        logprobs = [plain_logprob(policy, sequence, start) for sequence in pair_sequences(pair)]
        with torch.no_grad():
            wanted = [plain_logprob(reference, sequence, start) for sequence in pair_sequences(pair)]
        rewards = [BETA * (mine - theirs) for mine, theirs in zip(logprobs, wanted, strict=True)]
        right = torch.sigmoid(rewards[0] - rewards[1])
        if smoothing is None:
            total = total + ((rewards[0] - rewards[1]) / BETA - 0.5 / BETA) ** 2
        else:
            total = total - (1 - smoothing) * right.log() - smoothing * (1 - right).log()
        seen.append(([each.item() for each in rewards], [each.item() for each in logprobs]))
    return total / len(seen), seen


@pytest.mark.parametrize("smoothing", [0.0, 0.1, None], ids=["plain", "smoothed", "ipo"])
def test_loss_metrics_and_gradient_are_those_of_one_sequence_at_a_time(smoothing: float | None) -> None:
    plain, plain_reference = plain_models()
    loss, seen = plain_loss(plain, plain_reference, smoothing)
    made = task(*two_models(), **({"loss": "ipo"} if smoothing is None else {"label_smoothing": smoothing}))
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


def masked_pairs() -> list[PreferencePair]:
    """Some answers count whole, of others the first and the last token do not, or the second."""
    made = pairs()
    for number in (0, 3):
        ids = made[number].chosen_token_ids
        made[number] = replace(made[number], chosen_mask=(False, *[True] * (len(ids) - 2), False))
    ids = made[3].rejected_token_ids
    made[3] = replace(made[3], rejected_mask=(True, False, *[True] * (len(ids) - 2)))
    return made


@pytest.mark.parametrize("budget", [20, 8192])
def test_tokens_that_no_assistant_wrote_are_read_and_not_learned(budget: int) -> None:
    plain, plain_reference = plain_models()
    losses = []
    for pair in masked_pairs():
        start, rewards = len(pair.prompt_token_ids), []
        for ids, mask in zip(pair_sequences(pair), (pair.chosen_mask, pair.rejected_mask), strict=True):
            wanted = plain_logprob(plain_reference, ids, start, mask).detach()
            rewards.append(BETA * (plain_logprob(plain, ids, start, mask) - wanted))
        losses.append(-torch.nn.functional.logsigmoid(rewards[0] - rewards[1]))
    loss = torch.stack(losses).mean()
    made = task(*two_models(), masked_pairs(), tokens_per_microbatch=budget)
    assert worst_difference(gradients_of(plain, loss), first_update(made)[1]) < 1e-9
    record = made.evaluate()
    assert record.metrics["evaluation/loss"].value == pytest.approx(loss.item(), rel=1e-9)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
@pytest.mark.parametrize("budget", [1, 20, 40])
def test_the_gradient_does_not_depend_on_the_micro_batches(budget: int, loss: str) -> None:
    tasks = (task(*two_models(), loss=loss, tokens_per_microbatch=size) for size in (8192, budget))
    (_, whole), (_, cut) = map(first_update, tasks)
    assert worst_difference(whole, cut) < 1e-10


def test_before_the_first_step_policy_and_reference_are_one(tmp_path: Path) -> None:
    made = build_task(DPORecipe.model_validate(recipe_of("dpo", make_inputs(tmp_path))))
    record = made.evaluate()
    assert record.metrics["evaluation/loss"].value == pytest.approx(math.log(2), abs=1e-7)
    assert record.metrics["evaluation/margin_mean"].value == pytest.approx(0, abs=1e-7)


def check_base_as_reference(
    task_of: Callable[[LanguageModel, LanguageModel], SupervisedTask[Any, Any, Any]], *, checkpointing: bool = False
) -> None:
    """The base of an adapter as the reference gives the same bits in three steps as a frozen copy of it."""

    def trained(own_reference: bool) -> tuple[SupervisedTask[Any, Any, Any], list[dict[str, float]]]:
        model = LanguageModel(tiny_language_model(seed=1))
        reference = model.frozen_copy() if own_reference else None
        adapted = model.with_adapter(LoRAOptions(rank=2, alpha=4, seed=3))
        if checkpointing:
            adapted.use_activation_checkpointing()
        made = task_of(adapted, reference or base_alone(adapted))
        lines = [made.step(step).metrics for step in range(1, 4)]
        names = [name for name in lines[0] if name.startswith(f"{made.metric_group}/")]
        return made, [{name: line[name].value for name in names} for line in lines]

    (alone, found), (copied, expected) = trained(False), trained(True)
    assert found == expected
    margin = f"{alone.metric_group}/margin"
    assert found[2][margin] > found[0][margin]
    for (name, one), (_, other) in zip(
        alone.model.model.named_parameters(), copied.model.model.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name


def check_that_the_policy_alone_moves(
    task_of: Callable[[LanguageModel, LanguageModel], SupervisedTask[Any, Any, Any]],
) -> None:
    policy = LanguageModel(tiny_language_model())
    reference = policy.frozen_copy()
    before = copy.deepcopy(policy.model.state_dict())
    task_of(policy, reference).step(1)
    for name, weight in policy.model.named_parameters():
        assert not torch.equal(weight, before[name]), name
    for name, weight in reference.model.state_dict().items():
        assert torch.equal(weight, before[name]), name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_base_of_an_adapter_is_the_reference_as_a_frozen_copy_of_it_would_be(checkpointing: bool) -> None:
    check_base_as_reference(task, checkpointing=checkpointing)


def test_every_weight_of_the_policy_moves_and_the_reference_does_not() -> None:
    check_that_the_policy_alone_moves(task)


def trained(steps: int, *, on_training_pairs: bool = False, **config: Any) -> Record:
    """The evaluation on pairs of the same rule that no step has seen, or on those that it learned from."""
    model = LanguageModel(tiny_language_model())
    data = pairs(24)
    made = task(
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


def test_with_an_adapter_there_is_no_second_model(tmp_path: Path) -> None:
    made = build_task(recipe(make_inputs(tmp_path), **{"model.lora": LORA}))
    assert made.model.has_adapter
    assert is_shared(made.reference, made.model)
