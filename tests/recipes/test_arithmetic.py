"""The example of a reward function, and the recipes that use it, trained for real on a tiny model."""

import json

import pytest

from builders import tiny_language_model, tiny_tokenizer
from proximo.cli import main
from proximo.recipes.arithmetic import correct, problems

SMALL = [
    "model.path=model",
    "run.precision=float32",
    "run.tensorboard=false",
    "ppo.num_steps=1",
    "ppo.prompts_per_step=2",
    "ppo.responses_per_prompt=2",
    "ppo.minibatch_responses=null",
    "ppo.rollout.max_new_tokens=6",
    "ppo.rollout.max_num_seqs=4",
    "data.held_out_rows=3",
    "data.max_prompt_tokens=200",
    "data.sources.0.kwargs.num_rows=12",
    "run.save_every_steps=null",
]


def test_problems_are_sums_with_their_answers():
    rows = list(problems(50, seed=3, largest=99))
    assert rows == list(problems(50, seed=3, largest=99)) != list(problems(50, seed=4, largest=99))
    for row in rows:
        _, _, first, sign, second, *_ = row["prompt"][0]["content"].replace("?", "").split()
        assert {"+": int(first) + int(second), "-": int(first) - int(second)}[sign] == int(row["answer"])


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("12 + 30 is 42", 1.0),
        ("42", 1.0),
        ("It is 42.", 1.0),
        ("42 or 43", 0.0),
        ("", 0.0),
        ("no idea", 0.0),
        ("4 2", 0.0),
    ],
)
def test_the_last_number_is_what_counts(response, score):
    (verdict,) = correct([response], [{"answer": "42", "finish": "eos"}])
    assert verdict == {"score": score, "ended": 1.0}


def test_numbers_may_be_negative_or_written_with_commas_and_cut_answers_are_marked():
    verdicts = correct(["-7", "1,234"], [{"answer": "-7", "finish": "eos"}, {"answer": "1234", "finish": "length"}])
    assert verdicts == [{"score": 1.0, "ended": 1.0}, {"score": 1.0, "ended": 0.0}]


@pytest.mark.parametrize("recipe", ["ppo-function", "grpo-function"])
def test_the_shipped_recipe_trains_evaluates_and_resumes(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny_language_model(max_position_embeddings=512).save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    run = tmp_path / "runs" / recipe
    assert main(["ppo", recipe, *SMALL]) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert (run / "config.yaml").read_text().startswith("# override: model.path=model\n")
    assert main(["ppo", f"{run}/config.resolved.json", "--resume=auto"]) == 0
    assert main(["ppo", recipe, *SMALL]) == 2
    assert "already holds a finished run" in capsys.readouterr().err
    assert main(["evaluate", str(run), "--num-prompts", "2", "--output", "answers.jsonl"]) == 0
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 2
