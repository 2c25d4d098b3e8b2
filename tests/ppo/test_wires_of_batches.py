"""What an update is made of reaches it, by value: its rows, its epochs, its texts, and the tokens of a micro-batch.

That no gradient depends on the micro-batches is held elsewhere; here, that they are as large as the section says.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from builders import tiny_language_model, tiny_tokenizer
from ppo.test_wires_of_losses import batch
from proximo.config.ppo.options import PPOConfig
from proximo.models.packing import PackedResponses
from proximo.ppo.roles.worker import over_batches
from proximo.ppo.trainer import PPOTrainer
from proximo.ppo.update.epochs import plan_updates
from roles_made import state
from supervised.tiny_tasks import dpo_task, reward_task, sft_task, two_models

TASKS: dict[str, tuple[int, Callable[..., Any]]] = {
    "sft": (13, sft_task),
    "reward": (25, reward_task),
    "dpo": (27, lambda **options: dpo_task(*two_models(torch.float32), **options)),
}


def check(sizes: list[int], *, budget: int, num_rows: int) -> None:
    """Several micro-batches, none beyond the budget, and not each row alone."""
    assert max(sizes) <= budget
    assert 1 < len(sizes) < num_rows


@pytest.mark.parametrize("kind", TASKS)
def test_a_micro_batch_has_no_more_tokens_than_its_section_allows(kind: str) -> None:
    budget, make = TASKS[kind]
    made = make(tokens_per_microbatch=budget)
    batches = made.batches(made.examples)
    if kind != "sft":
        batches = [each for _, each in batches]
    sizes = [(each.answers if kind == "dpo" else each).packed.num_tokens for each in batches]
    check(sizes, budget=budget, num_rows=len(made.examples))


def test_the_passes_and_the_updates_of_ppo_keep_to_theirs() -> None:
    roles, experience, _ = batch(tokens_per_microbatch=21)
    passes: list[int] = []

    def note(packed: PackedResponses) -> torch.Tensor:
        passes.append(packed.packed.num_tokens)
        return torch.zeros(sum(packed.response_lengths))

    policy = roles.policy
    over_batches([each.response for each in experience.scored], note, policy.model, policy.config)
    cuts: list[int] = []
    learner, update = policy.learner, policy.learner.update

    def noted(microbatches: Any, *given: Any, **options: Any) -> Any:
        cuts.extend(each.packed.packed.num_tokens for each in microbatches)
        return update(microbatches, *given, **options)

    learner.update = noted  # type: ignore[method-assign]
    policy.train(experience, state())
    for sizes in (passes, cuts):
        check(sizes, budget=21, num_rows=6)


@pytest.mark.parametrize(("size", "sizes"), [(4, [4, 2]), (None, [2, 2, 2]), (5, [5, 1])])
def test_every_epoch_has_every_response_once_in_minibatches_of_the_given_size(size: int | None, sizes: list) -> None:
    """Of six, where none is given, two: a quarter, rounded up."""
    options = {"minibatch_responses": size, "epochs_per_step": 3}
    roles, experience, _ = batch(**options)
    plan = plan_updates(experience, roles.policy.config, seed=0, step=0)
    assert [len(members) for members in plan] == sizes * 3
    for epoch in range(3):
        members = plan[epoch * len(sizes) : (epoch + 1) * len(sizes)]
        assert sorted(i for each in members for i in each) == list(range(6))


def test_the_texts_of_an_update_have_their_number_their_weight_and_the_tokens_of_a_micro_batch() -> None:
    ptx = {"coefficient": 0.7, "examples_per_update": 5}
    config = PPOConfig(ptx=ptx, prompts_per_step=4, tokens_per_microbatch=14)
    texts = ["ab" * (number + 1) for number in range(6)]
    made = PPOTrainer(tiny_language_model(), tiny_tokenizer(), ptx=texts, config=config).roles.policy.texts
    batches, _ = made.batches(0)
    assert sum(len(each.response_lengths) for each in batches) == 5
    assert made.coefficient == 0.7
    check([each.packed.num_tokens for each in batches], budget=14, num_rows=5)
