"""Each command has its form in Python, and both give the same: files byte for byte, numbers bit for bit."""

import hashlib
import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from proximo.cli import main
from proximo.cli.program import app
from proximo.commands.library.saved_run import SavedRun
from proximo.commands.library.training import Training
from proximo.commands.pipeline import run as pipeline
from proximo.config.loader import resolved_yaml
from proximo.config.shipped import shipped_recipe, shipped_recipes
from proximo.errors import ConfigError, UserError
from proximo.message_text import format_number
from proximo.plan.record import to_json
from proximo.run import journal
from tiny_runs import make_inputs, recipe_of, share_of_vowels

NO_PYTHON = {"doctor", "engine", "serve-reward"}
"""They tell of the machine, ask for a first recipe at the terminal, and start servers."""
CLOCKS = re.compile(r"seconds|_second|throughput|memory|cache")


def files_of(folder: Path, pattern: str = "*") -> dict[str, str]:
    files = sorted(file for file in folder.rglob(pattern) if file.is_file())
    assert files
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of PPO in `run`, its recipe in recipe.yaml."""
    place = make_inputs(tmp_path_factory.mktemp("place"))
    recipe = recipe_of("ppo", place)
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    Training(recipe).fit(quiet=True)
    Training(recipe_of("reward", place), {"run.folder": str(place / "judge"), "reward.num_epochs": 0.5}).fit(quiet=True)
    return place


def plans(place: Path, out: Path, printed: Callable[[], str]) -> tuple[Any, Any]:
    main(["plan", str(place / "recipe.yaml"), "--json"])
    by_command = [stage | {"process_bytes": 0} for stage in json.loads(printed())]
    return by_command, to_json(Training(place / "recipe.yaml").plan(), process=0)


def generated(place: Path, out: Path, printed: Callable[[], str]) -> tuple[Any, Any]:
    options = ["--num-samples", "2", "--seed", "3", "--max-new-tokens", "4", "--output", str(out / "answers.jsonl")]
    main(["generate", str(place / "run"), "a b", "c d", *options])
    responses = SavedRun(place / "run").generate(["a b", "c d"], num_samples=2, seed=3, max_new_tokens=4)
    rows = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    return [(row["response"], row["finish"]) for row in rows], [(each.text, each.finish) for each in responses]


def ranked(place: Path, out: Path, printed: Callable[[], str]) -> tuple[Any, Any]:
    options = ["--num-samples", "4", "--keep", "2", "--max-new-tokens", "4", "--output", str(out / "best.jsonl")]
    main(["generate", str(place / "run"), "a b", "c d", *options, "--reward", "tiny_runs:share_of_vowels"])
    found = SavedRun(place / "run").generate(
        ["a b", "c d"], reward=share_of_vowels, keep=2, num_samples=4, max_new_tokens=4
    )
    rows = [json.loads(line) for line in (out / "best.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    return [(row["response"], row["score"]) for row in rows], [(each.response.text, each.score) for each in found]


def judged(place: Path, out: Path, printed: Callable[[], str]) -> tuple[Any, Any]:
    main(
        [
            "generate",
            str(place / "run"),
            "a",
            "--num-samples",
            "3",
            "--max-new-tokens",
            "4",
            "--reward",
            str(place / "judge"),
        ]
    )
    shown = re.findall(r"score (-?[\d.]+)", printed())
    found = SavedRun(place / "run").generate(["a"], reward=SavedRun(place / "judge"), num_samples=3, max_new_tokens=4)
    return shown, [format_number(each.score) for each in found]


def evaluated(place: Path, out: Path, printed: Callable[[], str]) -> tuple[Any, Any]:
    main(["evaluate", str(place / "run"), "--checkpoint", "step-4", "--output", str(out / "samples.jsonl")])
    run = SavedRun(place / "run")
    evaluation = run.evaluate(checkpoint="step-4")
    logged = next(line for line in run.metrics if line["step"] == 4)
    numbers = {name: value for name, value in evaluation.metrics.items() if not CLOCKS.search(name)}
    assert numbers
    assert numbers == {name: logged[name] for name in numbers}
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    return rows, json.loads(json.dumps([{"step": 4, **sample} for sample in evaluation.samples]))


def exported(place: Path, out: Path, printed: Callable[[], str]) -> tuple[Any, Any]:
    options = ["--role", "value", "--checkpoint", "best", "--dtype", "bfloat16"]
    main(["export", str(place / "run"), str(out / "command"), *options])
    SavedRun(place / "run").export(out / "library", role="value", checkpoint="best", dtype="bfloat16")
    return files_of(out / "command"), files_of(out / "library")


def reported(place: Path, out: Path, printed: Callable[[], str]) -> tuple[Any, Any]:
    main(["report", str(place / "run"), "--out", str(out / "command.html")])
    assert SavedRun(place / "run").report().read_bytes() == (place / "run" / "report.html").read_bytes()
    return (out / "command.html").read_bytes(), SavedRun(place / "run").report(out / "library.html").read_bytes()


def talked(place: Path, out: Path, printed: Callable[[], str]) -> tuple[Any, Any]:
    main(["chat", str(place / "run"), "--max-new-tokens", "4", "--seed", "2"])
    dialogue = SavedRun(place / "run").chat(max_new_tokens=4, seed=2)
    return printed(), "".join(f"{dialogue.answer(line).text}\n" for line in ("a b", "c d"))


def copied(place: Path, out: Path, printed: Callable[[], str]) -> tuple[Any, Any]:
    main(["recipes", "copy", "ppo", str(out / "mine.yaml")])
    assert "ppo" in [recipe.name for recipe in shipped_recipes()]
    return (out / "mine.yaml").read_text(), shipped_recipe("ppo").text


def checked(place: Path, out: Path, printed: Callable[[], str]) -> tuple[Any, Any]:
    main(["config", "show", str(place / "recipe.yaml"), "run.seed=7"])
    training = Training(place / "recipe.yaml", {"run.seed": 7})
    return yaml.safe_load(printed()), yaml.safe_load(resolved_yaml(training.recipe))


def trial(place: Path, out: Path, printed: Callable[[], str]) -> tuple[Any, Any]:
    main(["ppo", str(place / "recipe.yaml"), f"run.folder={out / 'new'}", "--dry-run"])
    training = Training(place / "recipe.yaml", {"run.folder": str(out / "new")})
    return printed(), training.dry_run() + "\n"


COMMANDS: dict[str, Callable[[Path, Path, Callable[[], str]], tuple[Any, Any]]] = {
    "plan": plans,
    "generate": generated,
    "generate --reward FUNCTION": ranked,
    "generate --reward RUN": judged,
    "evaluate": evaluated,
    "export": exported,
    "report": reported,
    "chat": talked,
    "recipes": copied,
    "config": checked,
    "--dry-run": trial,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_python_gives_what_the_command_gives(command, place, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", StringIO("a b\nc d\n"))
    by_command, by_library = COMMANDS[command](place, tmp_path, lambda: capsys.readouterr().out)
    assert by_command
    assert by_command == by_library


def test_every_command_has_its_form_in_python() -> None:
    trained = {"sft", "reward", "prm", "dpo", "kto", "ppo", "pipeline"}  # test_training_from_python.py
    missing = set(typer.main.get_command(app).commands) - trained - COMMANDS.keys() - NO_PYTHON  # type: ignore
    assert not missing


def test_a_pipeline_has_the_bits_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "write_report", lambda folder: folder / "report.html")
    monkeypatch.setattr(pipeline, "write_pipeline_report", lambda folder: folder / "report.html")
    assert main(["pipeline", "tiny", f"run.folder={tmp_path / 'command'}", "--quiet"]) == 0
    seen: list[int] = []
    training = Training("tiny", {"run.folder": str(tmp_path / "library")}, quiet=True)
    run = training.fit(quiet=True, on_step=lambda step, metrics: seen.append(step))
    assert len(training.plan()) == 3
    assert run.folder.name == "ppo"
    assert seen == [*range(6), *range(5), *range(3)]
    by_command, by_library = (files_of(tmp_path / name, "*.safetensors") for name in ("command", "library"))
    assert by_command == by_library


def test_what_a_command_does_not_take_is_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'temperatur'"):
        SavedRun(place / "run").generate(["a"], temperatur=1.0)
    with pytest.raises(ConfigError, match="on_step"):
        Training(place / "recipe.yaml").fit(resume="auto", on_step=print_nothing)  # type: ignore


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda run, out: run.generate("Hello"), "prompts are a list of at least one text, such as"),
        (lambda run, out: run.generate([]), "prompts are a list of at least one text"),
        (lambda run, out: run.generate(["a"], keep=1), "needs a reward"),
        (lambda run, out: run.generate(["a"], reward=share_of_vowels, keep=2), "chooses among num_samples"),
        (lambda run, out: run.generate(["a"], reward=print_nothing), "print_nothing|function"),
        (lambda run, out: run.generate(["a"], engine="vlm"), "engine is local, vllm, or the address"),
        (lambda run, out: run.export(out / "new", dtype="float64"), "dtype of an export is one of float32, bfloat16"),
        (lambda run, out: run.export(out / "new", private=True), "private is for a model that push creates"),
        (lambda run, out: run.export(out / "new", push="a/b/c"), "push needs a name on the Hub"),
        (lambda run, out: run.export(out / "file" / "new"), "file is a file"),
        (lambda run, _: run.export(3), "out is the folder to write, as text or a Path, got 3"),
        (lambda run, out: run.report(out / "file"), "not a page of Proximo"),
        (lambda run, out: run.evaluate(num_prompts=0), "num_prompts of an evaluation is at least 1, got 0"),
    ],
)
def test_what_a_run_cannot_do_is_refused_before_a_model_is_loaded(
    use, said, place, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proximo.commands.generate.load_language_model", None)
    monkeypatch.setattr("proximo.commands.export.export_model", None)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=said):
        use(SavedRun(place / "run"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def print_nothing() -> None: ...
