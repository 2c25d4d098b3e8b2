"""The two sequences of a pair compute once what they begin with: by tokens, and with the gradients of each alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import OF_SHARED_PREFIXES, build_architecture, keep_float64
from counting import Passes
from proximo.data.preferences import PreferencePair
from proximo.models import packing
from proximo.models.language import LanguageModel
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.models.transformers_model import disable_dropout
from proximo.supervised import reference
from proximo.supervised import reward_trainer as reward
from proximo.supervised.dpo_recipe import DPOConfig
from proximo.supervised.dpo_trainer import DPOTask
from proximo.supervised.reward_recipe import RewardTrainingConfig
from proximo.supervised.reward_trainer import RewardTask, num_shared
from supervised.tiny_tasks import first_update, task_inputs

ANSWERS = [
    ((10, 11, 12), (10, 13)),  # the same first token
    ((20, 21), (20, 21, 22, 23)),  # one begins with the other
    ((30,), (31, 32, 33, 34)),
    ((), (40, 41)),
    ((50, 51), (50, 51)),
]
PROMPTS = [(3, 4, 5, 6, 7), (8, 9, 3, 4), (5,), (6, 7, 8), (9, 3, 5, 4, 6, 8)]
PAIRS = [
    PreferencePair(id=str(i), prompt_token_ids=prompt, chosen_token_ids=chosen, rejected_token_ids=rejected)
    for i, (prompt, (chosen, rejected)) in enumerate(zip(PROMPTS, ANSWERS, strict=True))
]


def reward_task(architecture: str, dtype: torch.dtype, **options: Any) -> RewardTask:
    policy = LanguageModel(build_architecture(architecture).to(dtype))
    model = scalar_from_language_model(policy, HeadStart.NORMAL, seed=1)
    disable_dropout(model.model)
    config = RewardTrainingConfig(pairs_per_step=len(PAIRS), optimizer={"learning_rate": 1e-9}, **options)
    return RewardTask(task_inputs(model, PAIRS, PAIRS, config))


def dpo_task(architecture: str, dtype: torch.dtype, **options: Any) -> DPOTask:
    policy, reference = (LanguageModel(build_architecture(architecture).to(dtype)) for _ in range(2))
    disable_dropout(policy.model)
    with torch.no_grad():
        for weight in reference.model.parameters():
            weight.mul_(0.9)
    config = DPOConfig(pairs_per_step=len(PAIRS), optimizer={"learning_rate": 1e-9}, **options)
    inputs = task_inputs(policy, [pair for pair in PAIRS if pair.prompt_token_ids], PAIRS, config)
    return DPOTask(inputs, reference=reference)


TASKS: dict[str, Callable[..., Any]] = {
    "reward": reward_task,
    "divergence_window": lambda *given: reward_task(*given, loss="divergence_window"),
    "dpo": dpo_task,
}


CASES = [("llama", torch.float32), *((architecture, torch.float64) for architecture in OF_SHARED_PREFIXES)]


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize(("architecture", "dtype"), CASES)
def test_gradients_are_those_without_sharing(
    kind: str, architecture: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_float64(monkeypatch)
    found: dict[str, Tensor] = first_update(TASKS[kind](architecture, dtype))[1]
    for module in (packing, reference):
        monkeypatch.setattr(module, "shareable_prefixes", lambda prompts: [()] * len(prompts))
    monkeypatch.setattr(reward, "num_shared", lambda *_: 0)
    expected: dict[str, Tensor] = first_update(TASKS[kind](architecture, dtype))[1]
    bound = 1e-10 if dtype is torch.float64 else 1e-5
    whole = torch.cat([each.flatten() for each in expected.values()]).norm()
    assert whole > 0
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        # A gradient that is zero but for rounding, as of a bias of keys, is measured by that of the whole model.
        assert (found[name] - gradient).norm() <= bound * max(gradient.norm(), 1e-2 * whole), name


def test_what_a_pair_begins_with_is_computed_once() -> None:
    """The reward model shares answers too. With DPO each answer has the last prompt token, which predicts its first."""
    made = reward_task("llama", torch.float32)
    counted = Passes(model=made.model.base)
    made.step(1)
    shared = [
        num_shared(pair.prompt_token_ids + chosen, pair.prompt_token_ids + rejected)
        for pair, (chosen, rejected) in zip(PAIRS, ANSWERS, strict=True)
    ]
    assert shared == [6, 5, 1, 2, 7]
    total = sum(pair.num_tokens for pair in PAIRS)
    assert counted.tokens["model"] == [total - sum(shared)]
    trained = dpo_task("llama", torch.float32)
    counted = Passes(policy=trained.model.base, reference=trained.reference.base)
    trained.step(1)
    once = total - sum(len(prompt) - 1 for prompt in PROMPTS)
    assert counted.tokens == {"policy": [once], "reference": [once]}


@pytest.mark.parametrize("make", [reward_task, dpo_task])
def test_micro_batches_of_pairs_keep_to_the_tokens_that_are_computed(make: Callable[..., Any]) -> None:
    made = make("llama", torch.float32, tokens_per_microbatch=20)
    packed = [(each.answers if make is dpo_task else each).packed for _, each in made.batches(PAIRS)]
    assert 1 < len(packed) < len(PAIRS)
    assert max(each.num_tokens for each in packed) <= 20
