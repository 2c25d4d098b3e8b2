"""Rewards, rows and sinks that a program gives as objects do what their sections in a recipe do."""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from builders import tiny_language_model, tiny_tokenizer
from proximo import (
    FunctionReward,
    PPOConfig,
    PPOTrainer,
    Response,
    SavedRun,
    Scored,
    TrackedRun,
    Training,
    WeightedReward,
)
from proximo.config.environment import ROWS
from proximo.errors import ConfigError, RunFolderError
from proximo.ppo.recipe import PPORecipe
from tiny_runs import recipe_of, share_of_vowels


def brief(prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
    return [-len(text) / 10 for text in responses]


def scaled(prompts: Any, responses: Sequence[str], metadata: Any, **options: Any) -> list[float]:
    return [float(len(text)) for text in responses]


class Brief:
    """A source of scores."""

    name = "brief"

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        return [Scored(response=each, score=-len(each.text) / 10) for each in responses]


BY_NAME = [
    {"kind": "function", "name": "brief", "function": "test_objects_in_recipes:brief"},
    {"kind": "function", "name": "share_of_vowels", "function": "tiny_runs:share_of_vowels", "weight": 0.5},
]
REWARDS: dict[str, Any] = {
    "functions": [brief, (0.5, share_of_vowels)],
    "sources": [Brief(), (0.5, FunctionReward(share_of_vowels, name="share_of_vowels"))],
    "their sum": WeightedReward([(1, Brief()), (0.5, FunctionReward(share_of_vowels, name="share_of_vowels"))]),
    "beside a section": [brief, BY_NAME[1]],
}


pytestmark = pytest.mark.usefixtures("no_report")


def trained(inputs: Path, folder: Path, changes: Mapping[str, Any]) -> Training:
    short = {"run.folder": str(folder), "run.evaluate_every_steps": None, "value.init_from": "policy"}
    return Training(recipe_of("ppo", inputs), {**short, "ppo.num_steps": 2, "gold": share_of_vowels, **changes})


def numbers(training: Training) -> list[dict[str, float]]:
    lines = training.fit(quiet=True).metrics
    return [{key: value for key, value in line.items() if "/" in key and "time" not in key} for line in lines]


@pytest.fixture(scope="module")
def scores(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    lines = numbers(trained(inputs, tmp_path_factory.mktemp("by name") / "run", {"reward": BY_NAME}))
    return [{key: value for key, value in line.items() if key.startswith("score/")} for line in lines]


@pytest.mark.parametrize("form", REWARDS)
def test_a_reward_may_be_given_in_any_form(form, scores, inputs, tmp_path) -> None:
    lines = numbers(trained(inputs, tmp_path / "run", {"reward": REWARDS[form]}))
    assert "score/brief/mean" in scores[-1]
    assert [{key: line[key] for key in wanted} for wanted, line in zip(scores, lines, strict=True)] == scores


def test_an_environment_may_be_all_that_rewards_and_gives_rows() -> None:
    given = {"environment": {"kind": "tools", "path": "example_environments:Counter"}, "reward": [], "data.sources": []}
    recipe = Training("grpo-function", given, quiet=True).recipe
    assert isinstance(recipe, PPORecipe)
    assert recipe.reward == ()
    assert [source.function for source in recipe.data.sources] == [ROWS]
    with pytest.raises(ConfigError, match="gold is one reward, and got 0"):
        Training("grpo-function", {"gold": []}, quiet=True)
    with pytest.raises(ConfigError, match="at least one pair"):
        PPOTrainer(tiny_language_model(), tiny_tokenizer(), reward=[])


def test_the_trainer_takes_the_same_forms() -> None:
    config = PPOConfig(num_steps=1, prompts_per_step=2, rollout={"max_new_tokens": 4})
    found = []
    for reward in (REWARDS["functions"], REWARDS["sources"], REWARDS["their sum"]):
        trainer = PPOTrainer(tiny_language_model(seed=1), tiny_tokenizer(), config=config)
        (line,) = trainer.train(["ab", "cd"], reward=reward)
        found.append({key: value for key, value in line.items() if key.startswith("score/")})
    assert {"score/brief/mean", "score/share_of_vowels/mean"} <= found[0].keys()
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ([], "without a reward the policy learns from its reference"),
        ([("a", brief)], "pairs"),
        ([(True, brief)], "pairs"),
        ([(float("nan"), brief)], "pairs"),
        ([(0.5, brief, 1)], "pairs"),
        (3, "cannot be called"),
        ([lambda trainer_state: [0.0]], "trainer_state"),
        (Brief, "Brief"),
        ([brief, (0.5, brief)], "different names"),
    ],
)
def test_what_is_no_reward_is_refused_before_anything_is_loaded(reward, message, inputs, tmp_path) -> None:
    with pytest.raises(ConfigError, match=message):
        trained(inputs, tmp_path / "run", {"reward": reward})


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ([brief, share_of_vowels], "gold is one reward, and got 2"),
        (
            {"kind": "function", "name": "scaled", "function": scaled, "kwargs": {"by": min}},
            "the override of gold is not a plain value",
        ),
        (FunctionReward(scaled, name="scaled", kwargs={"by": [1, min]}), "the override of gold is not a plain value"),
    ],
)
def test_what_would_be_dropped_or_become_text_is_refused(reward, message, inputs, tmp_path) -> None:
    with pytest.raises(ConfigError, match=message):
        trained(inputs, tmp_path / "run", {"gold": reward})


def test_arguments_of_a_function_reach_it_whatever_they_are_called(inputs, tmp_path) -> None:
    names = {"sources": ["a", "b"], "reward": 2.0, "sinks": [1], "gold": None, "path": Path("x"), "by": {"sources": 3}}
    section = {"kind": "function", "name": "scaled", "function": scaled, "kwargs": names}
    for given in (section, FunctionReward(scaled, name="scaled", kwargs=names)):
        training = trained(inputs, tmp_path / "run", {"gold": given})
        assert training.recipe.gold.kwargs == names | {"path": "x"}
    one_by_one = {f"gold.kwargs.{name}": value for name, value in names.items()}
    again = trained(inputs, tmp_path / "run", {"gold": section | {"kwargs": {}}, **one_by_one})
    assert again.recipe.gold.kwargs == names | {"path": "x"}


def test_a_function_with_bound_arguments_is_known_by_its_source(inputs, tmp_path) -> None:
    def one(prompts, responses, metadata, by):
        return [by for _ in responses]

    def other(prompts, responses, metadata, by):
        return [by + 1 for _ in responses]

    training = trained(
        inputs, tmp_path / "run", {"reward": [functools.partial(one, by=2.0)], "run.save_every_steps": 1}
    )
    training.fit(quiet=True)
    changed = trained(
        inputs, tmp_path / "run", {"reward": [functools.partial(other, by=2.0)], "run.save_every_steps": 1}
    )
    with pytest.raises(RunFolderError, match="session_functions:"):
        changed.fit(quiet=True, resume="must")


def test_an_evaluation_with_another_function_of_the_same_name_says_so(inputs, tmp_path, capsys) -> None:
    def made(by: float) -> Any:
        def score(prompts, responses, metadata):
            return [by for _ in responses]

        return score

    def score(prompts, responses, metadata):
        return [3.0 for _ in responses]

    training = trained(inputs, tmp_path / "run", {"reward": [made(2.0)], "gold": None})
    run = training.fit(quiet=True)
    run.evaluate(num_prompts=2)
    assert "other than in the run" not in capsys.readouterr().err
    trained(inputs, tmp_path / "other", {"reward": [score], "gold": None})
    evaluation = SavedRun(tmp_path / "run").evaluate(num_prompts=2)
    assert evaluation.metrics["evaluation/score"] == 3.0
    assert "other than in the run: functions.proximo.session_functions:score: " in capsys.readouterr().err
    assert run.evaluate(num_prompts=2).metrics["evaluation/score"] == 2.0
    assert "other than in the run" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None,), "a recipe is a file, the name of a shipped one, or a mapping, got None"),
        ((["ppo"],), "a recipe is a file"),
        (("tiny", ["run.seed=1"]), "overrides are a mapping from dotted keys to values"),
        (("tiny", "run.seed=1"), "overrides are a mapping"),
        (("tiny", {1: 2}), "overrides are a mapping from dotted keys"),
    ],
)
def test_what_is_no_recipe_is_refused(given, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Training(*given)


def test_a_source_is_named_and_a_changed_one_is_not_resumed(inputs, tmp_path) -> None:
    class Twice(Brief):
        name = "brief"

    training = trained(inputs, tmp_path / "run", {"reward": [Brief()], "run.save_every_steps": 1})
    training.fit(quiet=True)
    other = trained(inputs, tmp_path / "run", {"reward": [Twice()], "run.save_every_steps": 1})
    with pytest.raises(RunFolderError, match="session_functions:Twice"):
        other.fit(quiet=True, resume="must")
    changed = type("Brief", (Brief,), {"__call__": lambda self, prompts: prompts})()
    other = trained(inputs, tmp_path / "run", {"reward": [changed], "run.save_every_steps": 1})
    with pytest.raises(RunFolderError, match='session_functions:Brief: "source with sha256 .* -> "source with sha256'):
        other.fit(quiet=True, resume="must")
    misnamed = {"kind": "function", "name": "other", "function": Brief()}
    with pytest.raises(ConfigError, match="set name"):
        trained(inputs, tmp_path / "new", {"reward": [misnamed]}).fit(quiet=True)


class Kept:
    """A sink that keeps what it gets, samples too."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.samples: list[int] = []
        self.closed = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        assert metrics
        self.steps.append(step)

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self.samples += [step] * len(samples)

    def close(self) -> None:
        self.closed += 1


def test_sinks_may_be_objects_and_get_each_step_once_over_a_resume(inputs, tmp_path) -> None:
    kept, made = Kept(), list[tuple[TrackedRun, Kept]]()

    def make(run: TrackedRun) -> Kept:
        made.append((run, Kept()))
        return made[-1][1]

    class Stop(RuntimeError): ...

    def stop(step: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            raise Stop

    changes = {"ppo.num_steps": 3, "run.save_every_steps": 1}
    training = trained(inputs, tmp_path / "run", {**changes, "run.sinks": [kept, make]})
    with pytest.raises(Stop):
        training.fit(quiet=True, on_step=stop)
    training.fit(quiet=True, resume="auto")
    assert kept.steps == [0, 1, 2, 3]
    assert {*kept.samples} == {0, 1, 2, 3}
    assert kept.closed == 2
    assert [sink.steps for _, sink in made] == [[0, 1, 2], [3]]
    assert len({run.id for run, _ in made}) == 1
    with pytest.raises(ConfigError, match="a sink is"):
        trained(inputs, tmp_path / "new", {"run.sinks": [3]})
    with pytest.raises(ConfigError, match=r"run\.sinks is a list of sinks, got .*: write \[sink\]"):
        trained(inputs, tmp_path / "new", {"run.sinks": kept})
    with pytest.raises(ConfigError, match="no method close"):
        trained(inputs, tmp_path / "new", {"run.sinks.0": type("Open", (), {"write": print})()})


def rows_of(inputs: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (inputs / f"{name}.jsonl").read_text().splitlines()]


def test_rows_in_every_form_train_the_same_model(inputs, tmp_path) -> None:
    rows = rows_of(inputs, "texts")

    class Table:
        """Rows that are made as they are read."""

        def __iter__(self):
            return iter(rows)

    forms: dict[str, Any] = {
        "file": {"path": str(inputs / "texts.jsonl")},
        "data set": Dataset.from_list(rows),
        "stream": IterableDataset.from_generator(lambda: iter(rows)),
        "list": rows,
        "iterable": Table(),
        "with options": {"function": Dataset.from_list([*rows, *rows]), "max_rows": len(rows)},
        "renamed": {
            "function": [{"ask": row["prompt"], "say": row["response"]} for row in rows],
            "columns": {"prompt": "ask", "response": "say"},
        },
    }
    losses = {}
    for form, source in forms.items():
        recipe = recipe_of("sft", inputs)
        changes = {"run.folder": str(tmp_path / form), "data.sources": [source], "sft.num_epochs": 0.5}
        run = Training(recipe, changes).fit(quiet=True)
        losses[form] = [line.get("sft/loss") for line in run.metrics]
    assert all(loss == losses["file"] for loss in losses.values()), losses


def test_a_dry_run_counts_the_rows_that_a_program_gives(inputs, tmp_path) -> None:
    rows = [{"prompt": "ab"}] * 60
    said = trained(inputs, tmp_path / "run", {"data.sources": rows, "data.held_out_rows": 100}).dry_run()
    assert "data         60 rows given in Python\n" in said
    assert "48 rows to learn from, 12 to evaluate on (at most a fifth; held_out_rows asks for 100)\n" in said
    stream = IterableDataset.from_generator(lambda: iter(rows))
    said = trained(inputs, tmp_path / "run", {"data.sources": stream, "data.held_out_rows": 100}).dry_run()
    assert "at most 100 rows held out for evaluation\n" in said


def test_a_data_set_with_splits_is_no_source_and_the_message_names_them(inputs) -> None:
    splits = DatasetDict({"train": Dataset.from_list(rows_of(inputs, "texts")), "test": Dataset.from_list([])})
    for key, given in {
        "data.sources": splits,
        "data.sources ": [splits],
        "data.sources.0": splits,
        "data.evaluation_sources": [{"function": splits}],
    }.items():
        with pytest.raises(ConfigError, match=r"is a mapping of several, 'train', 'test': give one .*\['train'\]"):
            Training(recipe_of("sft", inputs), {key.strip(): given})
