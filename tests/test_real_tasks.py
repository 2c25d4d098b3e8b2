"""The tasks of the runs with a real model: sums, checked instructions and their recipes; GSM8K for who has a GPU."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from builders import tiny_language_model, tiny_tokenizer
from proximo.cli import main
from proximo.config.loader import load_recipe
from proximo.errors import ConfigError
from real_data import real_data

ROOT = Path(__file__).parents[1]
PLACE = ROOT / "examples" / "real"
sums, instructions = (SimpleNamespace(**runpy.run_path(str(PLACE / f"{name}.py"))) for name in ("sums", "instructions"))
SMALL = [
    *("model.path=model", "model.lora.rank=2", "run.tensorboard=false", "data.max_prompt_tokens=500"),
    *("ppo.num_steps=1", "ppo.prompts_per_step=6", "ppo.responses_per_prompt=2", "ppo.num_minibatches=1"),
    "ppo.rollout.max_new_tokens=4",
]


def test_a_held_out_sum_is_not_learned_the_other_way_round() -> None:
    learned, held_out = ({row["prompt"]: row["answer"] for row in sums.rows(split)} for split in ("train", "held_out"))
    assert (len(learned), len(held_out)) == (1100, 500)
    pairs = [
        {tuple(sorted(map(int, prompt.split("?")[0][len("What is ") :].split(" + ")))) for prompt in split}
        for split in (learned, held_out)
    ]
    assert len(pairs[0] | pairs[1]) == 820, "every pair of 40 numbers"
    assert not pairs[0] & pairs[1]
    assert learned["What is 10 + 10? Answer with the number only."] == "20"
    with pytest.raises(ConfigError, match="train or held_out, got 'test'"):
        next(sums.rows("test"))


@pytest.mark.parametrize(
    ("rule", "kept", "broken"),
    [
        ("json", ['{"ANSWER": "x"}', ' {"ANSWER": 3}'], ['{"ANSWER": "x"', '{"answer": "x"}', "[1]", "3"]),
        ("short", ["Yes.", "one two 3 four five six seven eight"], ["", "...", "a b c d e f g h i"]),
        ("use", ["Because it rains", "so, BECAUSE!"], ["becauses", "cause"]),
        ("avoid", ["Then another thing ends"], ["Take the bus", "An apple and A pear", "go now"]),
        ("capitals", ["DO IT NOW!", '{"ABC": 12}'], ["Do it", "12", "A1"]),
        ("exclaim", ["GO!", '{"ANSWER": "GO!"}'], ["GO!!", "Oh! no", "!", "GO"]),
    ],
)
def test_a_rule_is_kept_by_what_it_says(rule: str, kept: list[str], broken: list[str]) -> None:
    found = instructions.keeps([*kept, *broken], rule)
    assert [row["kept"] for row in found] == [1.0] * len(kept) + [0.0] * len(broken)
    assert all(row["score"] == 1 for row in found[: len(kept)])
    assert all(row["score"] < 1 for row in found[len(kept) :])


def test_what_leads_to_a_rule_scores_something() -> None:
    assert [row["score"] for row in instructions.keeps(["Yes", "YeS!", ""], "capitals")] == pytest.approx(
        [1 / 6, 1 / 3, 0]
    )
    assert [row["score"] for row in instructions.keeps(['{"ANSWER": 1', "{}", "none"], "json")] == [0.5, 0.25, 0]


def test_answers_meet_those_of_the_base_to_the_same_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    wins = program("wins", monkeypatch)
    base = {"judge": [[0.0, 1.0], [0.0, 1.0]]}
    row = wins.compared(base, {"judge": [[2.0, 1.0], [0.0, -1.0]]})
    assert (row["wins by judge"], row["score of judge"]) == ((1 + 0.75 + 0.25 + 0) / 4, 0.5)
    assert row["interval by judge"] == [0.125, 0.875], "of two prompts, either one is drawn twice, or both"
    best = wins.best_by([[1.0, 3.0], [5.0, 2.0]], base["judge"])
    assert best == [[1.0], [0.0]], "the judge's scores of the answers that the reward model likes best"


def test_a_student_has_layers_of_its_teacher_and_a_teacher_no_distance_from_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = program("half", monkeypatch)
    monkeypatch.chdir(tmp_path)
    teacher = tiny_language_model(num_hidden_layers=16)
    with torch.no_grad():
        teacher.model.layers[8].mlp.down_proj.weight *= 1000  # The layer that the student does not have.
    teacher.save_pretrained("teacher")
    tiny_tokenizer().save_pretrained("teacher")
    tasks = [{"instruction": f"Say {number} words."} for number in range(8)]
    half.write_rows(Path("data/instruct/self_instruct_seed_tasks.jsonl"), tasks)
    half.write_rows(Path("data/preferences/prompts_train.jsonl"), [{"prompt": "word " * 41}, {"prompt": "Why?"}])
    half.make("teacher", "student")
    assert [row["prompt"] for row in half.read_rows(Path("data/half/prompts.jsonl"))] == [
        *[f"Say {number} words." for number in (1, 2, 3, 4, 6, 7)],
        "Why?",
    ]
    student = AutoModelForCausalLM.from_pretrained("student").model.layers
    kept = [*teacher.model.layers[:8], *teacher.model.layers[9:]]
    weights = [[layer.mlp.up_proj.weight for layer in layers] for layers in (student, kept)]
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    Path("runs").mkdir()
    half.compare("teacher", "teacher", "student")
    same, other, alone = json.loads(Path("runs/half.json").read_text())
    assert same["kl from the teacher"] == same["kl from the student"] == 0
    assert same["loss"] == alone["teacher's own loss"] != other["loss"]
    assert min(other["kl from the teacher"], other["kl from the student"]) > 0


@pytest.mark.parametrize(
    ("what", "label"), [("sentiment", "seed 3"), ("sums", "sums-groups-0"), ("preferences", "online")]
)
def test_the_curves_are_drawn_from_the_results(what: str, label: str, tmp_path: Path) -> None:
    curves = SimpleNamespace(**runpy.run_path(str(PLACE / "curves.py")))
    curves.main(what, str(tmp_path / "curves.svg"))
    assert label in (tmp_path / "curves.svg").read_text()


def program(name: str, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A program of the runs, which imports others beside it."""
    monkeypatch.syspath_prepend(PLACE)
    return SimpleNamespace(**runpy.run_path(str(PLACE / f"{name}.py")))


@pytest.mark.parametrize("recipe", ["sums-critic", "countdown-groups", "instructions"])
def test_the_recipe_runs_with_a_tiny_model(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = [*SMALL, f"run.folder={tmp_path / 'run'}"]
    if recipe == "instructions":
        path = real_data("instruct/self_instruct_seed_tasks.jsonl")
        overrides += [f"data.sources.0.kwargs.path={path}", f"data.evaluation_sources.0.kwargs.path={path}"]
    overrides += ["data.sources.0.max_rows=12", "data.evaluation_sources.0.max_rows=6"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained("model")
    tiny_language_model(num_hidden_layers=1, max_position_embeddings=512).save_pretrained("model")
    assert main(["ppo", str(PLACE / f"{recipe}.yaml"), *overrides, "--quiet"]) == 0
    start, step = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert start["evaluation/unscored"] == step["response/unscored"] == 0
    rules = [f"{rule}.kept" for rule in instructions.RULES]
    names = {"instructions": rules, "countdown-groups": ["countdown"]}.get(recipe, ["maths"])
    assert {f"evaluation/score/{name}" for name in names} <= {*start}


def test_both_recipes_of_sums_have_the_same_samples() -> None:
    groups, critic = (load_recipe("ppo", str(PLACE / f"sums-{name}.yaml"), []).recipe for name in ("groups", "critic"))
    assert (groups.data, groups.reward, groups.model, groups.ppo.rollout, groups.ppo.policy_optimizer) == (
        *(critic.data, critic.reward, critic.model, critic.ppo.rollout, critic.ppo.policy_optimizer),
    )
    assert (
        len({(ppo.num_steps, ppo.prompts_per_step, ppo.responses_per_prompt) for ppo in (groups.ppo, critic.ppo)}) == 1
    )


@pytest.mark.parametrize(("recipe", "prompts", "updates"), [("gsm8k-verl", 256, 4), ("gsm8k-nemo", 1024, 4)])
def test_the_gate_is_the_published_setting(recipe: str, prompts: int, updates: int) -> None:
    loaded = load_recipe("ppo", str(PLACE / f"{recipe}.yaml"), []).recipe
    assert loaded.ppo.prompts_per_step == prompts == updates * loaded.ppo.minibatch_responses
    assert (loaded.ppo.policy_optimizer.learning_rate, loaded.ppo.value_optimizer.learning_rate) == (1e-6, 1e-5)
    assert loaded.ppo.rollout.max_new_tokens == loaded.data.max_prompt_tokens == 512
