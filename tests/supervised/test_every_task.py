"""What holds for every supervised task: gradients and evaluations do not depend on the cut, and what trains moves."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import tiny_language_model
from ppo.test_updates import worst_difference
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.sharing import base_alone, is_shared
from proximo.supervised.task import SupervisedTask
from proximo.trainer_kinds import recipe_kind
from supervised.test_kto import far_models
from supervised.tiny_tasks import dpo_task, first_update, kto_task, prm_task, reward_task, sft_task, two_models
from tiny_runs import LORA, Kind, changed, make_inputs, recipe_of

Task = SupervisedTask[Any, Any, Any]
MADE: dict[str, Callable[[int], Any]] = {
    "sft": lambda budget: sft_task(torch.float64, tokens_per_microbatch=budget),
    "reward": lambda budget: reward_task(torch.float64, tokens_per_microbatch=budget, score_centring=0.1),
    "window": lambda budget: reward_task(torch.float64, tokens_per_microbatch=budget, loss="divergence_window"),
    # The solutions have different numbers of steps, so a mean of means would differ.
    "prm": lambda budget: prm_task(torch.float64, tokens_per_microbatch=budget),
    "dpo": lambda budget: dpo_task(*two_models(), tokens_per_microbatch=budget),
    "ipo": lambda budget: dpo_task(*two_models(), tokens_per_microbatch=budget, loss="ipo"),
    "kto": lambda budget: kto_task(
        *far_models(), tokens_per_microbatch=budget, desirable_weight=1.5, undesirable_weight=0.7
    ),
}
WITH_REFERENCE = {"dpo": dpo_task, "kto": kto_task}


@pytest.mark.parametrize("budget", [1, 14, 30])
@pytest.mark.parametrize("kind", MADE)
def test_the_gradient_does_not_depend_on_the_micro_batches(kind: str, budget: int) -> None:
    whole, cut = MADE[kind](8192), MADE[kind](budget)
    assert len(whole.batches(whole.examples)) == 1 < len(cut.batches(cut.examples))
    assert worst_difference(first_update(whole)[1], first_update(cut)[1]) < 1e-10


@pytest.mark.parametrize("kind", [kind for kind in MADE if kind != "sft"])
def test_every_row_has_its_own_scores_whatever_the_micro_batches_are(kind: str) -> None:
    found = []
    for budget in (8192, 24):
        task = MADE[kind](budget)
        task.held_out = task.examples
        assert (len(task.batches(task.held_out)) > 1) == (budget == 24)
        found.append(task.evaluate())
    whole, cut = found
    assert whole.metrics.keys() == cut.metrics.keys()
    assert len(whole.samples) == len(cut.samples) == len(task.held_out)
    for mine, theirs in zip(whole.samples, cut.samples, strict=True):
        numbers = {name for name, value in mine.items() if isinstance(value, float)}
        assert numbers
        assert {name: mine[name] for name in numbers} == pytest.approx({name: theirs[name] for name in numbers})
        assert all(mine[name] == theirs[name] for name in mine.keys() - numbers - {"probabilities"})
    assert len({sample.get("score", sample.get("score_chosen")) for sample in whole.samples}) > 1


@pytest.mark.parametrize("kind", MADE)
def test_an_update_that_is_skipped_leaves_no_loss(kind: str) -> None:
    task = MADE[kind](8192)
    with torch.no_grad():
        next(task.model.model.parameters()).fill_(math.nan)
    metrics = task.step(1).metrics
    assert metrics[f"{task.metric_group}/skipped_updates"].value == 1
    assert metrics[f"{task.metric_group}/loss"].count == 0


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(
    ("make", "options"),
    [(sft_task, {}), (reward_task, {}), (reward_task, {"loss": "divergence_window"}), (prm_task, {})],
    ids=["sft", "bradley_terry", "divergence_window", "prm"],
)
def test_training_gives_every_trainable_tensor_a_gradient_and_moves_it(
    make: Callable[..., Task], options: dict[str, Any], adapters: bool
) -> None:
    task = make(adapters=adapters, **options)
    (learner,) = task.learners.values()
    before = {name: parameter.detach().clone() for name, parameter in task.model.model.named_parameters()}
    # In the first update the second matrix of an adapter is zero, and with it the gradient of the first one.
    for step in range(1, 3 if adapters else 2):
        task.step(step)
    after = dict(task.model.model.named_parameters())
    assert set(learner.parameters) == {name for name, parameter in after.items() if parameter.requires_grad}
    assert (len(learner.parameters) < len(after)) == adapters
    without = [name for name, parameter in learner.parameters.items() if parameter not in learner.optimizer.state]
    moved = {name for name, parameter in after.items() if not torch.equal(parameter, before[name])}
    assert (without, moved) == ([], set(learner.parameters))


@pytest.mark.parametrize("make", WITH_REFERENCE.values(), ids=WITH_REFERENCE)
def test_every_weight_of_the_policy_moves_and_the_reference_does_not(make: Callable[..., Task]) -> None:
    policy = LanguageModel(tiny_language_model())
    reference = policy.frozen_copy()
    before = copy.deepcopy(policy.model.state_dict())
    make(policy, reference).step(1)
    for name, weight in policy.model.named_parameters():
        assert not torch.equal(weight, before[name]), name
    for name, weight in reference.model.state_dict().items():
        assert torch.equal(weight, before[name]), name


@pytest.mark.parametrize(("kind", "checkpointing"), [("dpo", False), ("dpo", True), ("kto", False)])
def test_the_base_of_an_adapter_is_the_reference_as_a_frozen_copy_of_it_would_be(
    kind: str, checkpointing: bool
) -> None:
    """With the same bits in three steps."""

    def trained(own_reference: bool) -> tuple[Task, list[dict[str, float]]]:
        model = LanguageModel(tiny_language_model(seed=1))
        reference = model.frozen_copy() if own_reference else None
        adapted = model.with_adapter(LoRAOptions(rank=2, alpha=4, seed=3))
        if checkpointing:
            adapted.use_activation_checkpointing()
        made = WITH_REFERENCE[kind](adapted, reference or base_alone(adapted))
        lines = [made.step(step).metrics for step in range(1, 4)]
        names = [name for name in lines[0] if name.startswith(f"{made.metric_group}/")]
        return made, [{name: line[name].value for name in names} for line in lines]

    (alone, found), (copied, expected) = trained(False), trained(True)
    assert found == expected
    assert found[2][f"{kind}/margin"] > found[0][f"{kind}/margin"]
    for (name, one), (_, other) in zip(
        alone.model.model.named_parameters(), copied.model.model.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("kind", WITH_REFERENCE)
def test_with_an_adapter_there_is_no_second_model(kind: Kind, tmp_path: Path) -> None:
    trainer: Any = recipe_kind(kind)
    recipe = changed(recipe_of(kind, make_inputs(tmp_path)), {"model.lora": LORA})
    made = trainer.build(trainer.schema.model_validate(recipe))
    assert made.model.has_adapter
    assert is_shared(made.reference, made.model)
