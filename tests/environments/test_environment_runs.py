"""Whole runs in environments: they learn, repeat to the bit, and go with what else a run may do."""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from builders import tiny_language_model, tiny_tokenizer
from ppo_trainers import all_weights
from proximo.algorithms.kl import k1
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ConfigError, DataError, GuardError
from proximo.models.language import LanguageModel
from proximo.models.pretrained.saving import save_pretrained
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.ppo.from_recipe import build_task
from proximo.ppo.recipe import PPORecipe
from proximo.ppo.task import evaluate_policy
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Finish, Prompt, Response
from proximo.rewards.model import ModelReward
from proximo.rollout.local import LocalEngine
from proximo.run.make.environments import PythonAgent, PythonEnvironment
from turn_templates import TURN_FAMILIES


class Letters:
    """Wants the letter that it names, then another one; each right one pays."""

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[str, dict]:
        self.wanted, self.turns = "ab"[seed % 2], 0
        return self.wanted, {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict]:
        right = text[:1] == self.wanted
        self.turns += 1
        self.wanted = "ba"["ab".index(self.wanted)]
        return self.wanted, float(right), self.turns == 2, False, {"right": right}


def trainer(environment: Any = Letters, *, seed: int = 0, **options: Any) -> PPOTrainer:
    base = {
        "num_steps": 2,
        "prompts_per_step": 4,
        "epochs_per_step": 1,
        "num_minibatches": 2,
        "rollout": {"max_new_tokens": 2},
        "kl": {"coefficient": 0.02},
        "policy_optimizer": {"learning_rate": 2e-2},
        "value_optimizer": {"learning_rate": 1e-2},
    }
    given = PythonEnvironment(make=environment, max_turns=4, max_tokens=60)
    config = PPOConfig(**(base | options))
    return PPOTrainer(
        tiny_language_model(seed=seed), tiny_tokenizer(chat=False), environment=given, config=config, seed=seed
    )


FORMS: dict[str, dict[str, Any]] = {
    "gae": {"prompts_per_step": 32},
    "group_centred": {"advantage": "group_centred", "prompts_per_step": 4, "responses_per_prompt": 8},
}


@pytest.mark.parametrize("form", ["gae", pytest.param("group_centred", marks=pytest.mark.soak)])
def test_a_run_learns_from_a_class_of_fifteen_lines(form: str) -> None:
    """Two letters, one each turn: 2 at best, about 1 in 32 at the start."""
    lines = trainer(num_steps=26, **FORMS[form]).train(64)
    scores = [line["score/mean"] for line in lines]
    assert mean(scores[:3]) < 0.2
    assert mean(scores[-5:]) > 0.8
    assert lines[-1]["environment/turns_mean"] == 2.0


VARIANTS: dict[str, dict[str, Any]] = {
    "staleness": {"rollout": {"max_new_tokens": 2, "staleness": 1}},
    "best of n": {"samples_per_prompt": 3, "responses_per_prompt": 2},
    "resample": {
        "responses_per_prompt": 2,
        "advantage": {"kind": "group_centred", "zero_variance_groups": "resample", "resample_rounds": 2},
    },
    "greedy baseline": {"advantage": "greedy_baseline"},
    "trunk": {"critic_warmup_steps": 1},
    "average": {"average_decay": 0.5},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_in_an_environment_repeats_to_the_bit(variant: str) -> None:
    runs = [trainer(**VARIANTS[variant]) for _ in range(2)]
    first, second = ([line["score/mean"] for line in each.train(6)] for each in runs)
    assert first == second
    assert all_weights(runs[0].policy.model).equal(all_weights(runs[1].policy.model))


def test_samples_do_not_depend_on_how_many_environments_run_at_once() -> None:
    few = PythonEnvironment(make=Letters, max_turns=4, max_tokens=60, workers=1)
    config = PPOConfig(prompts_per_step=4, rollout={"max_new_tokens": 2, "max_num_seqs": 1})
    policy, tokenizer = tiny_language_model(), tiny_tokenizer(chat=False)
    alone = PPOTrainer(policy, tokenizer, environment=few, config=config).generate(5)
    together = trainer().generate(5)
    assert [r.token_ids for r in alone] == [r.token_ids for r in together]
    assert [r.prompt for r in alone] == [r.prompt for r in together]


def test_log_probs_of_trajectories_are_the_learners() -> None:
    made = trainer()
    for response in made.generate(4):
        own = made.roles.policy.logprobs([response])
        assert (response.logprobs - own)[response.response_mask].abs().max() < 1e-5


class Again:
    """Eight turns."""

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[str, dict]:
        self.turns = 0
        return "say it", {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict]:
        self.turns += 1
        return f"again {text}", 1.0, self.turns == 8, False, {}


def test_log_probs_after_forks_are_the_learners() -> None:
    """The template opens each turn with an empty thought, and leaves it out of earlier turns."""
    tokenizer = TURN_FAMILIES["qwen 3"].tokenizer("again and again the answer is 1234" * 9)
    variables = {"enable_thinking": False}
    given = PythonEnvironment(make=Again, max_turns=9, max_tokens=3000, template_variables=variables)
    policy = tiny_language_model(vocab_size=len(tokenizer), max_position_embeddings=4096)
    config = PPOConfig(prompts_per_step=4, rollout={"max_new_tokens": 6})
    made = PPOTrainer(policy, tokenizer, environment=given, config=config)
    for response in made.generate(3):
        own = made.roles.policy.logprobs([response])
        assert (len(response.episode.turns), len(response.forks)) == (8, 7)
        assert (response.logprobs - own)[response.response_mask].abs().max() < 1e-5


def test_the_kl_of_an_evaluation_is_of_what_the_policy_wrote() -> None:
    made = trainer()
    with torch.no_grad():
        made.policy.model.lm_head.weight += 0.5 * torch.randn_like(made.policy.model.lm_head.weight)
    prompts, reward = made._prompts(6), made.roles.reward.source
    found = evaluate_policy(made.roles, prompts, reward=reward, config=made.config, seed=3)
    responses = [scored.response for scored in found.scored]
    policy, reference = (worker.logprobs(responses) for worker in (made.roles.policy, made.roles.reference))
    parts = k1(policy, getattr(reference, "logprobs", reference)).split([len(each.token_ids) for each in responses])
    expected = [part[each.response_mask].sum() for part, each in zip(parts, responses, strict=True)]
    assert found.kl == pytest.approx([each.item() for each in expected], abs=1e-5)
    assert not all(each.response_mask.all() for each in responses)


def test_numbers_of_an_info_that_no_float_holds_are_left_out() -> None:
    class Large(Letters):
        def step(self, text: str) -> tuple[str, float, bool, bool, dict]:
            return "", 1.0, True, False, {"large": 10**400, "small": 3}

    line = trainer(Large, num_steps=1).train(4)[0]
    assert line["environment/info/small"] == 3
    assert "environment/info/large" not in line


def test_rewards_of_ones_own_are_added_to_those_of_the_environment() -> None:
    made = trainer()

    def extra(responses: list[str], metadata: list[Mapping[str, Any]]) -> list[float]:
        return [10.0 + row["bonus"] for row in metadata]

    line = made.train([{"bonus": 5.0}] * 4, reward=[(2.0, extra)])[0]
    assert line["score/extra/mean"] == 15.0
    assert line["score/mean"] == pytest.approx(line["score/environment/mean"] + 30.0)


class Watched(LocalEngine):
    """Says that its log-probs are to be compared with the learner's after each push, and notes on which prompts."""

    max_logprob_error = 1e-3  # ty: ignore

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.compared: list[Prompt] = []

    def generate(self, prompts: Sequence[Prompt], **options: Any) -> list[Response]:
        self.compared += prompts
        return super().generate(prompts, **options)


def test_an_engine_is_compared_with_the_learner_on_first_observations() -> None:
    policy, tokenizer = LanguageModel(tiny_language_model()), tiny_tokenizer(chat=False)
    engine = Watched(policy, tokenizer, eos_token_ids=[2])
    config = PPOConfig(num_steps=2, prompts_per_step=8, policy_optimizer={"learning_rate": 1e-2})
    environment = PythonEnvironment(make=Letters, max_tokens=30)
    trained = PPOTrainer(policy, tokenizer, environment=environment, engine=engine, config=config)
    trained.train(8, reward=lambda prompts, responses, metadata: [float(len(set(text))) for text in responses])
    assert len(engine.compared) == 2 * 4
    assert {prompt.text for prompt in engine.compared} <= {"a", "b"}


class Broken(Letters):
    def step(self, text: str) -> tuple[str, float, bool, bool, dict]:
        raise RuntimeError("the board is gone")


def test_a_run_ends_where_too_many_environments_fail() -> None:
    with pytest.raises(GuardError, match="4 of 4 responses could not be scored.*the board is gone"):
        trainer(Broken).train(8)


def test_what_a_recipe_refuses_is_refused_in_python_as_well() -> None:
    with pytest.raises(ConfigError, match="environment: rollout.min_new_tokens counts the tokens of one response"):
        trainer(rollout={"max_new_tokens": 4, "min_new_tokens": 2})
    scorer = scalar_from_language_model(LanguageModel(tiny_language_model()), HeadStart.NORMAL)
    with pytest.raises(ConfigError, match="environment: reward reward_model: there are reward models"):
        trainer().train(4, reward=ModelReward(scorer))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_turns", 0),
        ("max_turns", None),
        ("max_turns", "four"),
        ("max_tokens", 1),
        ("workers", 0),
        ("timeout_seconds", -1.0),
        ("timeout_seconds", None),
        ("max_seconds", 0),
    ],
)
def test_limits_out_of_range_are_refused(name: str, value: Any) -> None:
    for made in (
        lambda **limit: PythonEnvironment(make=Letters, **limit),
        lambda **limit: PythonAgent(run=len, **limit),
    ):
        with pytest.raises(ConfigError, match=name):
            made(**{name: value})


def test_only_an_environment_cuts_observations_and_it_need_not() -> None:
    with pytest.raises(ConfigError, match="max_observation_tokens"):
        PythonAgent(run=len, max_observation_tokens=3)
    with closing(PythonEnvironment(make=Letters, max_observation_tokens=None).arena(tiny_tokenizer())) as arena:
        assert arena.renderer.max_observation_tokens is None


def test_what_is_no_environment_and_no_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="environment must be a class with reset and step"):
        PPOTrainer(tiny_language_model(), tiny_tokenizer(), environment="Letters")
    with pytest.raises(DataError, match="rows, a list of mappings, or from a number of episodes, got 'abc'"):
        trainer().generate("abc")
    with pytest.raises(DataError, match="must be a mapping, or a Prompt, got 'abc'"):
        trainer().generate(["abc"])


GUESS = """
class Guess:
    def __init__(self, top):
        self.top = top

    def reset(self, *, seed, row):
        self.number = seed % self.top
        return f"{row.get('hint', '')}?", {}

    def step(self, text):
        right = text[:1] == str(self.number)
        return "no", float(right), right, False, {"right": right, "top": self.top}
"""


def recipe(folder: Path, changes: Mapping[str, Any]) -> PPORecipe:
    save_pretrained(tiny_language_model(), folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "guess.py").write_text(GUESS)
    base = {
        "run": {"folder": str(folder / "run"), "device": "cpu"},
        "model": {"path": str(folder / "model")},
        "environment": {
            "path": f"{folder}/guess.py:Guess",
            "kwargs": {"top": 4},
            "num_rows": 20,
            "max_turns": 2,
            "max_tokens": 40,
            "workers": 4,
        },
        "data": {"held_out_rows": 3},
        "ppo": {
            "num_steps": 1,
            "prompts_per_step": 4,
            "solved_score": 1,
            "evaluation_samples_per_prompt": 2,
            "rollout": {"max_new_tokens": 3},
        },
    }
    return PPORecipe.model_validate(base | changes)


def test_a_recipe_needs_no_data_and_evaluates_on_held_out_seeds(tmp_path: Path) -> None:
    task = build_task(recipe(tmp_path, {}))
    try:
        assert (len(task.prompts), len(task.held_out)) == (17, 3)
        record = task.step(1)
        first, again = task.evaluate(), task.evaluate()
    finally:
        task.close()
    assert first is not None
    assert again is not None
    assert [each["response"] for each in first.samples] == [each["response"] for each in again.samples]
    assert {"evaluation/score", "evaluation/pass_at_2", "evaluation/turns"} <= first.metrics.keys()
    assert {"environment/turns_mean", "environment/model_seconds"} <= record.metrics.keys()
    assert record.samples[0]["response"].startswith("[turn 1] ")
    assert record.samples[0]["finish"] in ("terminated", "length")


def test_every_key_of_the_section_reaches_the_episodes(tmp_path: Path) -> None:
    def played(folder: str, **changes: Any) -> list[Any]:
        (tmp_path / folder).mkdir()
        base = {"path": f"{tmp_path}/{folder}/guess.py:Guess", "kwargs": {"top": 4}, "num_rows": 8, "max_turns": 3}
        section = base | {"max_tokens": 40, "workers": 4} | changes
        task = build_task(recipe(tmp_path / folder, {"environment": section, "data": {}}))
        try:
            responses = task.ppo.generate(task.prompts)
        finally:
            task.close()
        return [(r.token_ids, r.finish, r.episode.num_cut_observations, r.episode.info) for r in responses]

    base = played("base")
    keys = {"max_turns": 1, "max_tokens": 4, "max_observation_tokens": 1, "kwargs": {"top": 1}, "num_rows": 9}
    for key, value in keys.items():
        assert played(key, **{key: value}) != base, key


def test_rows_of_the_data_are_given_to_reset(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"hint": each}) + "\n" for each in "abcd"))
    task = build_task(recipe(tmp_path, {"data": {"sources": [{"path": str(tmp_path / "rows.jsonl")}]}}))
    try:
        responses = task.ppo.generate(task.prompts)
    finally:
        task.close()
    assert [response.prompt.text for response in responses] == ["a?", "b?", "c?", "d?"]
    assert {response.finish for response in responses} <= {Finish.TERMINATED, Finish.LENGTH}


def test_a_model_that_cannot_read_a_whole_conversation_is_refused(tmp_path: Path) -> None:
    environment = {"path": f"{tmp_path}/guess.py:Guess", "kwargs": {"top": 4}, "max_tokens": 300}
    with pytest.raises(
        ConfigError, match=r"up to 300 tokens, but the policy model .* at most 256 .*; lower environment.max_tokens"
    ):
        build_task(recipe(tmp_path, {"environment": environment}))
    large, tokenizer = tiny_language_model(max_position_embeddings=1024), tiny_tokenizer()
    critic = scalar_from_language_model(LanguageModel(tiny_language_model()), HeadStart.ZERO)
    with pytest.raises(ConfigError, match=r"up to 1024 .* value model .* 256 .*, in Python max_tokens of PythonEnv"):
        PPOTrainer(large, tokenizer, value=critic, environment=Letters)
