"""`zero_variance_groups: resample`: a step samples further prompts until enough groups differ, up to a bound."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from builders import tiny_language_model, tiny_tokenizer
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ConfigError
from proximo.models.language import LanguageModel
from proximo.ppo.calls import OwnCall
from proximo.ppo.train_state import TrainState
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Scored
from proximo.rollout.sampling import RandomKey

TEXTS = ["ab", "cde", "f", "gh", "ijk", "lm", "n", "op", "qrs", "t"]
SIZE, SAMPLES = 3, 2


def trainer(**options: Any) -> PPOTrainer:
    advantage = {"kind": "group_centred", "zero_variance_groups": "resample", "resample_rounds": 3}
    base = {
        "num_steps": 3,
        "prompts_per_step": SIZE,
        "responses_per_prompt": SAMPLES,
        "advantage": advantage | options.pop("advantage", {}),
        "rollout": {"max_new_tokens": 4},
        "policy_optimizer": {"learning_rate": 1e-2},
    }
    return PPOTrainer(LanguageModel(tiny_language_model()), tiny_tokenizer(), config=PPOConfig(**(base | options)))


class Grader:
    """Gives the two responses to a prompt different scores, or one score to both; keeps what it was asked."""

    def __init__(self, *differ: str) -> None:
        self.differ = differ
        self.asked: list[str] = []

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], metadata: Any) -> list[float]:
        self.asked += prompts[::SAMPLES]
        return [float(prompt in self.differ and index % SAMPLES) for index, prompt in enumerate(prompts)]


def taught(outcome_of: PPOTrainer, grader: Grader) -> list[list[Scored]]:
    """The responses that each step was made of."""
    steps: list[list[Scored]] = []

    def keep(made: Any, scored: Sequence[Scored], *inputs: Any) -> None:
        steps.append(list(scored))

    outcome_of.own_calls = (OwnCall(at="experience", does="measure", function=keep),)
    outcome_of.train(TEXTS, reward=grader)
    return steps


def test_a_step_learns_from_groups_that_differ_and_the_next_begins_where_it_ended() -> None:
    grader, made = Grader("ab", "f", "gh", "lm", "op", "t"), trainer()
    steps = taught(made, grader)
    order = [prompt.text for number in range(9) for prompt in made.in_order(made._prompts(TEXTS))(number)]
    assert grader.asked == order[: len(grader.asked)], "every prompt in its order, none twice within an epoch"
    for step in steps:
        texts = [str(scored.response.prompt.text) for scored in step[::SAMPLES]]
        assert len(texts) == SIZE
        assert set(texts) <= set(grader.differ)
    assert made.state.extra_rollouts == len(grader.asked) // SIZE - made.config.num_steps > 0


def test_after_the_last_round_the_step_is_filled_up_with_groups_that_train_nothing() -> None:
    made = trainer(num_steps=1)
    grader = Grader("ab")
    grader.differ = (str(made.in_order(made._prompts(TEXTS))(0)[1].text),)
    (step,) = taught(made, grader)
    assert len(grader.asked) == 3 * SIZE
    texts = [scored.response.prompt.text for scored in step[::SAMPLES]]
    assert texts[0] == grader.differ[0]
    assert len(texts) == SIZE


def test_a_step_without_any_group_that_differs_changes_no_weight() -> None:
    made = trainer(num_steps=1)
    before = [tensor.detach().clone() for tensor in made.policy.model.parameters()]
    (line,) = made.train(TEXTS, reward=Grader())
    assert all(torch.equal(one, other) for one, other in zip(before, made.policy.model.parameters(), strict=True))
    assert line["group/rollouts"] == 3
    assert line["group/effective_fraction"] == 0
    assert line["response/sampled"] == 3 * SIZE * SAMPLES
    assert line["progress/prompts"] == 3 * SIZE
    assert line["time/rollout_seconds"] > 0
    assert line["time/score_seconds"] > 0


def test_where_all_groups_differ_the_run_is_that_of_exclude() -> None:
    lines = []
    for treatment in ("exclude", "resample"):
        made = trainer(advantage={"zero_variance_groups": treatment})
        lines.append(made.train(TEXTS, reward=Grader(*TEXTS)))
    for one, other in zip(*lines, strict=True):
        names = {name for name in one if not name.startswith(("time/", "throughput/", "source/"))}
        assert {name: other[name] for name in names} == {name: one[name] for name in names}
        assert other["group/rollouts"] == 1
        assert other["response/sampled"] == SIZE * SAMPLES


def test_each_round_has_a_key_of_its_own() -> None:
    made = trainer(num_steps=1)
    keys: list[RandomKey] = []
    generate = made.roles.policy.engine.generate

    def noted(*given: Any, key: RandomKey, **options: Any) -> Any:
        keys.append(key)
        return generate(*given, key=key, **options)

    made.roles.policy.engine.generate = noted
    made.train(TEXTS, reward=Grader())
    assert [key.step for key in keys] == [0, 1, 2]


def test_the_state_says_how_many_rollouts_there_were_and_an_old_one_had_one_per_step() -> None:
    state = TrainState(kl_coefficient=0.1, steps_done=4, extra_rollouts=3)
    assert state.rollouts_done == 7
    assert TrainState.from_json(state.to_json(), steps_done=4) == state
    old = {name: value for name, value in state.to_json().items() if name != "extra_rollouts"}
    assert TrainState.from_json(old, steps_done=4).rollouts_done == 4


def test_a_step_of_ones_own_prompts_has_no_further_ones() -> None:
    made = trainer()
    with pytest.raises(ConfigError, match="which only `train` knows"):
        made.run_step(prompts=made._prompts(TEXTS[:SIZE]))
