"""`proximo pass-rate`: a data set with measured pass rates, which the filter of prompts reads."""

import json
from pathlib import Path

import pytest
import yaml

from builders import tiny_language_model, tiny_tokenizer
from proximo.cli import main
from proximo.commands.pass_rates import rated_row, sampling_only
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.rows import Row
from proximo.ppo.recipe import PPORecipe
from records_made import response, scored
from tool_templates import TOOL_FAMILIES

RECIPE = {
    "run": {"folder": "run", "device": "cpu", "num_threads": 1, "tensorboard": False},
    "model": {"path": "model"},
    "value": {"init_from": "policy"},
    "data": {"sources": [{"path": "rows.jsonl"}], "held_out_rows": 2, "max_prompt_tokens": 16},
    "reward": [
        {"kind": "function", "name": "right", "function": "test_pass_rates:by_letter"},
        {"kind": "function", "name": "form", "function": "test_pass_rates:by_length"},
    ],
    "ppo": {
        "num_steps": 1,
        "prompts_per_step": 3,
        "task_reward": "right",
        "solved_score": 1.0,
        "rollout": {"max_new_tokens": 4, "greedy": True},
        "kl": {"reference_every_steps": 1},
        "average_decay": 0.9,
    },
}


def by_letter(prompts, responses, metadata):
    """a is always solved, b never, c by every second response, and d cannot be judged."""
    verdicts = {"a": [1.0, 1.0], "b": [0.0, 0.0], "c": [0.0, 1.0], "d": [None, 0.0]}
    return [verdicts[prompt[0]][index % 2] for index, prompt in enumerate(prompts)]


def by_length(prompts, responses, metadata):
    return [len(text) / 10 for text in responses]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tiny_language_model(num_hidden_layers=1).save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    rows = [{"prompt": letter * n, "answer": str(n), "level": n} for n in (1, 2, 3) for letter in "abcd"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return tmp_path


def rated(folder: Path, *more: str) -> list[dict]:
    assert main(["pass-rate", "recipe.yaml", "rated.jsonl", *more, "--samples-per-prompt", "4"]) == 0
    return [json.loads(line) for line in (folder / "rated.jsonl").read_text().splitlines()]


def test_each_training_prompt_gets_the_outcomes_of_its_responses(folder: Path, capsys: pytest.CaptureFixture) -> None:
    rows = rated(folder, "data.held_out_rows=0", "ppo.guards.max_unscored_fraction=0.5")
    assert [row["prompt"] for row in rows] == [letter * n for n in (1, 2, 3) for letter in "abcd"]
    wanted = {"a": [1.0] * 4, "b": [0.0] * 4, "c": [0.0, 1.0] * 2, "d": [0.0, 0.0]}
    assert all(row["base_scores"] == wanted[row["prompt"][0]] for row in rows), "the outcome alone, without the form"
    assert rows[5] == {"id": "rows-6", "prompt": "bb", "answer": "2", "level": 2, "base_scores": [0.0] * 4}
    shown = capsys.readouterr().out
    assert "rated.jsonl: 12 prompts, 4 responses each\n" in shown
    assert not (folder / "run").exists(), "it is no run"
    assert not list(folder.glob(".*rated*"))


def test_the_filter_leaves_out_what_was_rated_too_easy_or_too_hard(folder: Path) -> None:
    rated(folder, "data.held_out_rows=0", "ppo.guards.max_unscored_fraction=0.5")
    source = [
        "ppo.prompts_per_step=2",
        "data.sources=[{path: rated.jsonl}]",
        "data.filter={above: 0.9, below: 0.1, from_epoch: 0}",
    ]
    assert main(["ppo", "recipe.yaml", *source, "ppo.guards.max_unscored_fraction=1", "data.held_out_rows=0"]) == 0
    (*_, last) = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (last["filter/active"], last["filter/too_easy"], last["filter/too_hard"]) == (3, 3, 6)


def test_held_out_prompts_are_not_rated_and_a_few_can_be_tried_first(folder: Path) -> None:
    rows = rated(folder, "--num-prompts", "5", "ppo.guards.max_unscored_fraction=1")
    assert len(rows) == 5


def test_what_cannot_be_written_is_said_before_a_model_is_loaded(folder: Path, capsys: pytest.CaptureFixture) -> None:
    (folder / "there.jsonl").write_text("")
    assert main(["pass-rate", "recipe.yaml", "there.jsonl"]) == 2
    assert main(["pass-rate", "recipe.yaml", "nowhere/out.jsonl"]) == 2
    told = capsys.readouterr().err
    assert "there.jsonl exists and is left as it is" in told
    assert "there is no folder nowhere" in told


def test_too_many_responses_without_a_score_end_it_and_leave_no_file(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["pass-rate", "recipe.yaml", "rated.jsonl", "ppo.guards.max_unscored_fraction=0"]) == 1
    assert "could not be scored" in capsys.readouterr().err
    assert not list(folder.glob("*rated*"))
    assert not list(folder.glob(".*rated*"))


def test_rating_asks_for_no_model_but_the_policy() -> None:
    recipe = sampling_only(PPORecipe.model_validate(RECIPE))
    assert (recipe.ppo.kl.kind, recipe.ppo.uses_critic, recipe.gold) == ("none", False, None)
    greedy = PPORecipe.model_validate(RECIPE).ppo.rollout
    assert recipe.ppo.rollout == greedy.model_copy(update={"greedy": False}), "equal responses would rate nothing"


def test_a_prompt_with_tools_and_earlier_turns_is_written_as_it_is_read():
    tokenizer = TOOL_FAMILIES["llama 3.1"].tokenizer()
    tool = {"name": "weather", "parameters": {"type": "object", "required": None}}
    values = {
        "prompt": [{"role": "user", "content": "Rain?"}],
        "system": "Be brief.",
        "history": [["Hi!", "Hello."]],
        "tools": [tool],
        "chat_template_kwargs": {"date": "today"},
        "level": 3,
    }
    (prompt,), _ = load_prompts([Row(source="a", number=1, values=values, from_table=True)], tokenizer, PromptOptions())
    written = json.loads(json.dumps(rated_row([scored(1.0, of=response(to=prompt))], None)))
    (again,), _ = load_prompts([Row(source="b", number=1, values=written)], tokenizer, PromptOptions())
    assert (again.token_ids, again.messages) == (prompt.token_ids, prompt.messages)
    assert again.template_variables == prompt.template_variables
    assert (again.base_score, again.metadata["level"]) == (1.0, 3)
