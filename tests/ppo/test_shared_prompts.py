"""Responses to one prompt compute it once, in every pass of a step, and nothing that the step gives changes by it."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import tiny_language_model, tiny_tokenizer
from counting import Operations, Passes
from proximo.config.ppo.options import PPOConfig
from proximo.models import packing
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, pack_responses
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.ppo.roles import worker
from proximo.ppo.trainer import PPOTrainer
from proximo.ppo.update import epochs
from proximo.records import Prompt
from proximo.rewards import model as reward_model
from proximo.rewards.model import ModelReward
from records_made import response

PROMPTS = [Prompt(id=str(n), token_ids=tuple(range(20 + n, 20 + n + size))) for n, size in enumerate((9, 1, 5, 12))]
GROUP = 3


@pytest.fixture
def unshared(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def apply() -> None:
        for module in (packing, worker, epochs, reward_model):
            monkeypatch.setattr(module, "shareable_prefixes", lambda prompts: [()] * len(prompts))

    return apply


def made_trainer(*, value: Any = None, **options: Any) -> PPOTrainer:
    """GPT-2, since Llama's norm goes through float32."""
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": None}
    policy = LanguageModel(tiny_language_model("gpt2", dtype=torch.float64, **shape))
    plain: dict[str, Any] = {
        "num_steps": 3,
        "prompts_per_step": len(PROMPTS),
        "responses_per_prompt": GROUP,
        "minibatch_responses": 6,
        "keep_groups_together": True,
        "policy_optimizer": {"learning_rate": 1e-3},
    }
    if value is None:
        plain["value_optimizer"] = {"learning_rate": 1e-3}
    if value is None and "advantage" not in options:
        value = scalar_from_language_model(policy, HeadStart.NORMAL, seed=2)
    return PPOTrainer(policy, tiny_tokenizer(), value=value, config=PPOConfig(**plain | options))


def steps_of(trainer: PPOTrainer) -> tuple[list[dict[str, float]], list[Tensor]]:
    """Metrics without those of time and memory, and the weights at the end."""
    lines = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        answers = [
            torch.randint(6, 60, (1 + (5 * i + step) % 7,), generator=generator).tolist()
            for i in range(GROUP * len(PROMPTS))
        ]
        scores = torch.randn(len(answers), generator=generator).tolist()
        line = trainer.step(PROMPTS, answers, scores)
        timed = ("time/", "throughput/", "memory/", "reward/seconds")
        lines.append({name: value for name, value in line.items() if not name.startswith(timed)})
    models = [trainer.policy.model, *([trainer.roles.value.model.model] if trainer.roles.value else [])]
    return lines, [weight.detach() for model in models for weight in model.parameters()]


CASES: dict[str, dict[str, Any]] = {
    "critic": {},
    "trunk": {"value": "trunk"},
    "small micro-batches": {"tokens_per_microbatch": 30},
    "groups": {
        "advantage": "group_centred",
    },
    "full KL": {"kl": {"estimator": "full", "kind": "loss", "coefficient": 0.1}},
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_gives_what_it_gives_without_sharing(case: str, unshared: Callable[[], None]) -> None:
    options = dict(CASES[case])
    value = options.pop("value", None)
    found, weights = steps_of(made_trainer(value=value, **options))
    unshared()
    expected, expected_weights = steps_of(made_trainer(value=value, **options))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, number in theirs.items():
            assert ours[name] == pytest.approx(number, rel=1e-9, abs=1e-9, nan_ok=True), name
    for ours, theirs in zip(weights, expected_weights, strict=True):
        # Adam divides by the size of a gradient: one that is zero but for rounding moves its weight all the same.
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7)


def test_every_pass_of_a_step_computes_each_prompt_once() -> None:
    trainer = made_trainer(minibatch_responses=12, epochs_per_step=1)
    counted = Passes(
        policy=trainer.policy.base,
        reference=trainer.roles.reference.model.base,
        value=trainer.roles.value.model.base,
    )
    answers = [[7, 8, 9, 10]] * (GROUP * len(PROMPTS))
    trainer.step(PROMPTS, answers, [0.1 * i for i in range(len(answers))])
    own = 4 * GROUP * len(PROMPTS)
    once = sum(len(prompt.token_ids) - 1 for prompt in PROMPTS) + GROUP * len(PROMPTS) + own
    assert set(counted.tokens["reference"]) == {once}
    assert set(counted.tokens["policy"]) == {once}
    assert set(counted.tokens["value"]) == {once}


@pytest.mark.parametrize(("kept", "tokens"), [(True, 2 * (8 + 3 * 4 + 8 + 3 * 4)), (False, None)])
def test_groups_that_are_kept_together_share_their_prompts_in_updates(kept: bool, tokens: int | None) -> None:
    """Two minibatches of two groups each; drawn one by one, the responses to a prompt are mostly apart."""
    prompts = [Prompt(id=str(n), token_ids=tuple(range(20 + n, 29 + n))) for n in range(4)]
    trainer = made_trainer(keep_groups_together=kept, epochs_per_step=1)
    counted = Passes(policy=trainer.policy.base)
    with torch.enable_grad():
        trainer.step(prompts, [[7, 8, 9]] * 12, [0.1 * i for i in range(12)])
    trained = sum(counted.tokens["policy"][-2:])
    assert trained == tokens if tokens is not None else trained > 2 * (8 + 3 * 4 + 8 + 3 * 4)


@pytest.mark.parametrize("dense", ["none", "deltas", "absolute"])
def test_a_reward_model_scores_a_group_as_it_scores_each_alone(dense: Any) -> None:
    model = scalar_from_language_model(LanguageModel(tiny_language_model()), HeadStart.NORMAL, seed=1)
    answers = [(7, 8, 2), (9,), (), (7, 8, 11, 12)]
    responses = [response(answer, to=prompt) for answer in answers for prompt in PROMPTS]
    counted = Passes(model=model.base)
    together = ModelReward(model, dense=dense).score(responses)
    assert counted.tokens["model"] == [sum(len(p.token_ids) - 1 for p in PROMPTS) + 16 + 4 * 8]
    for each, mine in zip(responses, together, strict=True):
        (alone,) = ModelReward(model, dense=dense).score([each])
        assert mine.score == pytest.approx(alone.score, abs=1e-5)
        if alone.token_rewards is not None:
            torch.testing.assert_close(mine.token_rewards, alone.token_rewards, rtol=0, atol=1e-5)


PROMPT, NEW, MANY = 1024, 64, 16


def operations(model: ScalarModel, batch: PackedResponses, *, train: bool) -> int:
    with Operations() as counted, nullcontext() if train else torch.no_grad():
        values = model.response_values(batch)
        if train:
            values.sum().backward()
    return counted.matrices + counted.attention


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_group_of_sixteen_costs_at_most_twice_one_response(architecture: str, *, train: bool) -> None:
    """By operations, of a value or reward model: a prompt of 1,024 tokens, and 64 new ones of each."""
    limit = {"max_position_embeddings": 2048}
    model = scalar_from_language_model(LanguageModel(tiny_language_model(architecture, **limit)), HeadStart.NORMAL)
    prompt = [3 + i % 50 for i in range(PROMPT)]
    responses = [[3 + (i + row) % 50 for i in range(NEW)] for row in range(MANY)]
    group = operations(model, pack_responses([prompt] * MANY, responses), train=train)
    one = operations(model, pack_responses([prompt], responses[:1]), train=train)
    assert group <= 2 * one
    if not train:
        apart = [[row, *prompt[1:]] for row in range(MANY)]
        assert operations(model, pack_responses(apart, responses), train=False) == MANY * one
