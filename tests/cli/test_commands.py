"""The command line itself: help, shipped recipes, configuration, dry runs, and how trainers are started."""

import errno
import io
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
import yaml

from builders import tiny_tokenizer
from proximo.cli import doctor, main
from proximo.cli.arguments import lines_of_stdin
from proximo.cli.doctor import CHECKS
from proximo.cli.program import app, explicit_resume
from proximo.config.loader import load_recipe, read_document
from proximo.config.shipped import shipped_recipes
from proximo.errors import CheckpointError, TrainingError, UserError
from proximo.run.options import RunOptions
from proximo.trainer_kinds import recognise
from recipe_files import DPO, KTO, PIPELINE, PPO, REWARD, SFT, write_recipe

COMMANDS = (
    *("sft", "reward", "dpo", "kto", "ppo", "pipeline", "generate", "chat"),
    *("evaluate", "export", "report", "recipes", "config", "serve-reward", "doctor"),
)
STARTS_QUICKLY = """
import sys
from proximo.cli import main
assert main({argv}) == 0
heavy = ("torch", "transformers", "datasets", "peft", "matplotlib", "rich")
print([name for name in heavy if name in sys.modules], file=sys.stderr)
"""


@pytest.fixture
def started(monkeypatch):
    """Stands in for the training; holds what it was started with."""
    calls = []

    def run_recipe(recipe, options):
        calls.append((recipe, options))
        return 143

    monkeypatch.setitem(sys.modules, "proximo.commands.pipeline.run", SimpleNamespace(run_recipe=run_recipe))
    return calls


def child(argv, **more):
    return subprocess.run(
        [sys.executable, "-c", STARTS_QUICKLY.format(argv=argv)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        **more,
    )


def test_help_answers_at_once_and_without_torch():
    before = os.times()
    done = child(["--help"])
    after = os.times()
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert "Train language models with PPO" in done.stdout
    # Processor time, since other work on the machine does not count against it.
    assert after.children_user + after.children_system - before.children_user - before.children_system < 0.7


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command, capsys):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"proximo {command} " in text
    assert command in {line.split()[0] for line in help_of_all(capsys).splitlines() if line.startswith("  ")}


def test_every_page_that_a_help_names_is_whole(capsys, monkeypatch):
    def ways(command, words):
        yield words
        for name, below in getattr(command, "commands", {}).items():
            yield from ways(below, [*words, name])

    monkeypatch.setenv("COLUMNS", "80")
    for words in ways(typer.main.get_command(app), []):
        assert main([*words, "--help"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"docs/remote-rewards\.(md|html)", text)
    assert not re.search(r"docs/\S*-\n", text)


def help_of_all(capsys):
    main([])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "wanted"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)]
)
def test_idle_threads_sleep_soon_unless_the_user_says_otherwise(given, wanted, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(given))
    assert main(["recipes"]) == 0
    assert os.environ.get("GOMP_SPINCOUNT") == wanted


def test_proximo_is_also_a_module_and_says_its_version(capsys):
    assert main(["--version"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("proximo 0.")
    done = subprocess.run(
        [sys.executable, "-m", "proximo", "--version"], capture_output=True, text=True, check=False, timeout=600
    )
    assert (done.returncode, done.stdout) == (0, said)


def test_shipped_recipes_are_listed_with_what_they_are_for(capsys):
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    names = ("sft", "reward", "dpo", "kto", "ppo", "ppo-function", "grpo-function")
    for name in (*names, "pythia-1b-tldr", "qwen2.5-0.5b-rlhf"):
        assert f"\n{name} " in f"\n{listed}"


@pytest.mark.parametrize("recipe", shipped_recipes(), ids=lambda recipe: recipe.name)
def test_every_shipped_recipe_says_its_command_and_passes_a_dry_run(recipe, folder, capsys):
    kind = recognise(read_document(recipe.name).data)
    assert kind is not None
    assert recipe.command == kind.name
    assert recipe.summary.removeprefix(f"{recipe.command}: ")
    assert main([recipe.command, recipe.name, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "whole run" in said.out
    as_theirs = recipe.name == "torchtune-ppo"  # compiles and checkpoints, as torchtune's recipe does
    assert said.err == (
        "note: run.compile has no effect: under activation_checkpointing no layers are compiled\n" * as_theirs
    )
    assert list(folder.iterdir()) == []


def test_a_dry_run_imports_no_torch(folder):
    done = child(["pipeline", "qwen2.5-0.5b-rlhf", "--dry-run"], cwd=folder)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    done = child(["ppo", "ppo-function", "--dry-run"], cwd=folder)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert list(folder.iterdir()) == []


PRM = """
run: {folder: runs/prm}
model: {path: owner/model}
data: {sources: [], held_out_rows: 0}
"""


@pytest.mark.parametrize(
    ("kind", "recipe", "wanted"),
    [
        ("ppo", PPO, "prompt"),
        ("sft", SFT, "prompt"),
        ("reward", REWARD, "chosen"),
        ("kto", KTO, "prompt"),
        ("prm", PRM, "prompt"),
    ],
)
def test_a_dry_run_finds_columns_that_are_not_mapped(kind, recipe, wanted, folder, capsys):
    (folder / "mine.csv").write_text("question,reply\nWhat is 2 plus 2?,4\nWhat is 3 plus 3?,6\n")
    asked = [kind, write_recipe(folder, recipe), "data.sources=[{path: mine.csv}]", "data.held_out_rows=0"]
    assert main([*asked, "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "mine.csv, row 1 (line 2)" in said
    assert f"`columns: {{{wanted}: <column>}}`" in said


ROWS = {
    "sft": (SFT, {"prompt": "2 + 2?", "response": "4"}),
    "reward": (REWARD, {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}),
    "kto": (KTO, {"prompt": "2 + 2?", "response": "4", "label": True}),
    "prm": (PRM, {"prompt": "2 + 2?", "steps": ["4"], "labels": [1]}),
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_dry_run_names_the_columns_that_are_not_used(kind, folder, capsys):
    recipe, row = ROWS[kind]
    row |= {"prompt": json.dumps([{"role": "user", "content": "2 + 2?"}]), "level": 3}
    (folder / "mine.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(row | {'hint': 'even'})}\n")
    asked = [kind, write_recipe(folder, recipe), "data.sources=[{path: mine.jsonl}]", "data.held_out_rows=0"]
    assert main([*asked, "--dry-run"]) == 0
    said = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "mine.jsonl: columns not used: 'hint' (1 row), 'level' (2 rows)" in said
    assert "mine.jsonl: messages read from JSON text in: 'prompt' (2 rows)" in said
    (folder / "mine.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(row | {'images': ['a.png']})}\n")
    assert main([*asked, "--dry-run"]) == 2
    assert "mine.jsonl, row 2: column 'images'" in capsys.readouterr().err


def test_a_dry_run_reads_steps_with_labels_without_torch(folder):
    (folder / "mine.jsonl").write_text('{"prompt": "2 + 2?", "steps": ["2 + 2 = 4"], "labels": [true]}\n' * 2)
    given = ["prm", write_recipe(folder, PRM), "data.sources=[{path: mine.jsonl}]", "--dry-run"]
    done = child(given, cwd=folder)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert "2 rows to learn from" in done.stdout


def test_a_dry_run_names_the_sinks(folder, capsys):
    path = write_recipe(folder, PPO)
    assert main(["ppo", path, "run.sinks=[{kind: function, function: 'json:loads'}]", "--dry-run"]) == 0
    assert "sink         json:loads, run runs/x\n" in capsys.readouterr().out


def test_the_numbers_of_a_dry_run_are_those_of_the_recipe(folder, capsys):
    path = write_recipe(folder, PPO)
    settings = ["prompts_per_step=6", "responses_per_prompt=5", "minibatch_responses=8", "epochs_per_step=3"]
    settings += ["rollout.max_new_tokens=40"]
    assert main(["ppo", path, "data.max_prompt_tokens=60", *(f"ppo.{each}" for each in settings), "--dry-run"]) == 0
    text = capsys.readouterr().out
    # 6 x 5 responses; ceil(30 / 8) = 4 minibatches, 30 = 3 x 8 + 6; 3 epochs; 30 x (60 + 40) tokens; 10 steps.
    assert "6 prompts x 5 = 30 responses" in text
    assert "3 epochs x 4 minibatches of 8, the last of 6 = 12 updates" in text
    assert "30 x (60 + 40) = 3,000 tokens" in text
    assert "10 steps: 300 responses, 120 updates, at most 30,000 tokens" in text


@pytest.mark.parametrize(
    ("overrides", "name", "text"),
    [
        ([], "saves", "after the last step"),
        (["run.save_every_steps=20", "run.save_every_minutes=5"], "saves", "every 20 steps, every 5 minutes and after"),
        (["data.held_out_rows=2"], "evaluates", "before the first step and after the last"),
        (["data.held_out_rows=2", "run.evaluate_every_steps=1"], "evaluates", "before the first step, every step and"),
        ([], "sink", "TensorBoard, in runs/x/tensorboard"),
        (["data.sources=[{path: p.jsonl}]"], "", "10 steps x 64 prompts on 48 rows: 13 passes"),
    ],
)
def test_a_dry_run_of_ppo_says_what_the_run_does_when(folder, capsys, overrides, name, text):
    (folder / "p.jsonl").write_text('{"prompt": "a"}\n' * 48)
    assert main(["ppo", write_recipe(folder, PPO), *overrides, "--dry-run"]) == 0
    assert f"\n  {name:<12} {text}" in f"\n{capsys.readouterr().out}"


@pytest.mark.parametrize(
    ("overrides", "role", "text"),
    [
        ([], "reference", "a frozen copy of the policy"),
        (["model.lora.rank=4"], "reference", "the policy's base, no second copy"),
        (
            ["model.lora.rank=4", "model.quantisation=4bit", "value.path=owner/critic"],
            "policy",
            "LoRA of rank 4 on all-linear, its base in 4bit",
        ),
        (
            ["model.lora.rank=4"],
            "policy",
            "owner/model (from the Hub: no local folder has that name), LoRA of rank 4 on all-linear",
        ),
        (["ppo.kl=none"], "reference", "none"),
        (
            ["reference.path=owner/other"],
            "reference",
            "owner/other (from the Hub: no local folder has that name), frozen",
        ),
        ([], "value", "backbone of the policy, fresh head"),
        (["value.init_from=reward"], "value", "backbone and head of the reward model"),
        (["value.path=owner/critic"], "value", "owner/critic (from the Hub: no local folder has that name)"),
        (["ppo.advantage=group_centred", "ppo.responses_per_prompt=2"], "value", "none: advantage group_centred"),
        (["ppo.advantage=return_to_go"], "value", "none: advantage return_to_go has no critic"),
        (
            [],
            "reward",
            "reward_model: owner/reward (from the Hub: no local folder has that name), weight 2",
        ),
        (["model.path=model"], "policy", "model (folder), trained whole"),
        (["model.path=model", "model.frozen_layers=3"], "policy", "model (folder), all but its first 3 layers trained"),
        (
            ["devices.num=2", "devices.reference.shard=replicate"],
            "ranks",
            "2 on this machine; policy full, reference replicate, value full, reward full",
        ),
    ],
)
def test_a_dry_run_says_which_model_takes_which_role(folder, capsys, overrides, role, text):
    (folder / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / "model" / name).write_text("{}")
    assert main(["ppo", write_recipe(folder, PPO), *overrides, "--dry-run"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[0] == role]
    assert text in line


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ([], "a frozen copy of the policy"),
        (["model.lora.rank=4"], "the policy's base, no second copy"),
        (["reference.path=owner/other"], "owner/other (from the Hub: no local folder has that name), frozen"),
    ],
)
def test_a_dry_run_of_dpo_says_what_the_reference_is(folder, capsys, overrides, text):
    assert main(["dpo", write_recipe(folder, DPO), *overrides, "--dry-run"]) == 0
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.split()[0] == "reference"]
    assert text in line
    assert "8 pairs (two sequences each, read by policy and reference)" in said


@pytest.mark.parametrize(("point", "text"), [("kl", ", and 8 to other prompts, read by"), ("zero", ", read by")])
def test_a_dry_run_of_kto_says_what_is_read(folder, capsys, point, text):
    assert main(["kto", write_recipe(folder, KTO), f"kto.reference_point={point}", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "a frozen copy of the policy" in said
    assert f"8 answers to their prompts{text} policy and reference, one update" in said


def test_keys_that_do_nothing_are_noted_on_stderr(folder, capsys, started):
    overrides = ["ppo.kl=none", "reference.path=owner/other"]
    assert main(["ppo", write_recipe(folder, PPO), *overrides, "--quiet"]) == 143
    assert capsys.readouterr().err == "note: reference has no effect: ppo.kl is none\n"


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], RunOptions()),
        (["--resume"], RunOptions(resume="must")),
        (["--resume=auto"], RunOptions(resume="auto")),
        (["--overwrite"], RunOptions(overwrite=True)),
        (["--resume", "--allow-changed-rewards"], RunOptions(resume="must", allow_changed_rewards=True)),
        (
            ["--resume", "--allow-different-environment", "-q"],
            RunOptions(resume="must", allow_different_environment=True, quiet=True),
        ),
    ],
)
def test_a_trainer_is_started_with_the_recipe_and_options_and_gives_the_exit_status(
    folder, started, arguments, options, monkeypatch
):
    monkeypatch.setattr("proximo.run.preflight.check_run", lambda *_, **__: None)
    path = write_recipe(folder, PPO)
    assert main(["ppo", path, "run.seed=3", *arguments]) == 143
    ((recipe, given),) = started
    assert recipe == load_recipe("ppo", path, ["run.seed=3"]).recipe
    assert given.recipe_text == "# override: run.seed=3\n" + PPO
    assert given == RunOptions(**{name: getattr(options, name) for name in NAMES}, recipe_text=given.recipe_text)


NAMES = ("resume", "overwrite", "allow_different_environment", "allow_changed_rewards", "quiet")


def test_resume_stands_alone_wherever_it_is_written():
    assert explicit_resume(["ppo", "--resume", "r.yaml"]) == ["ppo", "--resume=must", "r.yaml"]
    assert explicit_resume(["--resume=auto", "--", "--resume"]) == ["--resume=auto", "--", "--resume"]


@pytest.mark.parametrize("error", [TrainingError("it broke"), CheckpointError("damaged"), ZeroDivisionError("a bug")])
def test_a_failure_is_one_message_and_status_1_and_a_bug_keeps_its_traceback(folder, monkeypatch, capsys, error):
    def run_recipe(recipe, options):
        raise error

    monkeypatch.setitem(sys.modules, "proximo.commands.pipeline.run", SimpleNamespace(run_recipe=run_recipe))
    with pytest.raises(ZeroDivisionError) if isinstance(error, ZeroDivisionError) else nullcontext():
        assert main(["ppo", write_recipe(folder, PPO)]) == 1
        assert capsys.readouterr().err == f"loading torch and transformers\nerror: {error}\n"


def test_functions_beside_the_user_are_found_and_the_path_is_left_as_it_was(folder, started):
    (folder / "my_reward.py").write_text(
        "def score(prompts, responses, metadata):\n    return [0.0] * len(responses)\n"
    )
    path = list(sys.path)
    override = "reward=[{kind: function, function: 'my_reward:score'}]"
    assert main(["ppo", write_recipe(folder, PPO), override]) == 143
    assert sys.path == path


def test_a_shipped_recipe_is_shown_and_copied_and_never_over_a_file(folder, capsys):
    assert main(["recipes", "show", "ppo"]) == 0
    text = capsys.readouterr().out
    assert main(["recipes", "copy", "ppo", "mine.yaml"]) == 0
    assert Path("mine.yaml").read_text() == text
    assert main(["recipes", "copy", "ppo"]) == 0
    assert Path("ppo.yaml").read_text() == text
    (folder / "recipes").mkdir()
    assert main(["recipes", "copy", "ppo", "recipes"]) == 0
    assert Path("recipes/ppo.yaml").read_text() == text
    assert main(["ppo", "mine.yaml", "--dry-run"]) == 0


@pytest.mark.parametrize("text", [SFT, REWARD, PPO, PIPELINE])
def test_config_show_prints_a_recipe_with_every_value(folder, capsys, text):
    assert main(["config", "show", write_recipe(folder, text), "run.seed=5"]) == 0
    shown = capsys.readouterr().out
    assert yaml.safe_load(shown)["run"]["seed"] == 5
    assert yaml.safe_load(shown)["run"]["grace_seconds"] == 25.0
    (folder / "shown.yaml").write_text(shown)
    assert main(["config", "show", "shown.yaml"]) == 0
    assert capsys.readouterr().out == shown


def test_config_schema_is_json_schema_with_descriptions(capsys):
    assert main(["config", "schema", "ppo"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["GAEConfig"]["properties"]["gae_lambda"]["description"].startswith(
        "Lambda of the advantages"
    )


DISK = [OSError(getattr(errno, name), "refused", "x") for name in ("ENOSPC", "EROFS", "EFBIG", "ESTALE", "EIO")]
MEMORY = [
    MemoryError(),
    RuntimeError("std::bad_alloc"),
    RuntimeError("can't start new thread"),
    ImportError("libx.so: failed to map segment from shared object"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]


@pytest.mark.parametrize(
    ("error", "said"),
    [*((each, "error: disk error: [Errno ") for each in DISK), *((each, "error: out of memory (") for each in MEMORY)],
)
def test_a_disk_or_a_memory_that_refuses_is_one_message_with_its_reason(monkeypatch, capsys, error, said):
    def fail(*given, **options):
        raise error

    monkeypatch.setattr("proximo.cli.program.typer.main.get_command", lambda app: Refusing(fail))
    assert main(["report", "x"]) == 1
    text = capsys.readouterr().err
    assert text.startswith(said)
    assert (str(error) or "MemoryError") in text
    assert "Traceback" not in text


def test_a_model_for_which_memory_does_not_suffice_is_not_called_unreadable(monkeypatch, tmp_path, capsys):
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")

    def fail(*given, **options):
        raise MemoryError

    for reader in ("AutoConfig", "AutoTokenizer"):
        with monkeypatch.context() as patched:
            patched.setattr(f"transformers.{reader}.from_pretrained", fail)
            assert main(["generate", str(tmp_path), "x"]) == 1
            assert capsys.readouterr().err.splitlines()[1].startswith("error: out of memory (MemoryError)")


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_a_locale_without_utf_8_loses_no_character_and_ends_no_command(tmp_path):
    script = (
        "import sys; from proximo.cli import program\n"
        "program._escape_unencodable_output()\n"
        "print('z\\u00fcrich'); print('\\u4e2d', file=sys.stderr)\n"
    )
    environment = {**os.environ, **ASCII}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=600, env=environment
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "z\\xfcrich\n", "\\u4e2d\n")
    recipe = write_recipe(tmp_path, SFT.replace("runs/x", "runs/z\u00fcrich"))
    command = [str(Path(sys.executable).with_name("proximo")), "sft", recipe, "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=environment)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1, 2)


def test_prompts_from_a_pipe_are_utf_8_whatever_the_locale(monkeypatch):
    given = io.TextIOWrapper(io.BytesIO("z\u00fcrich\n".encode()), encoding="ascii")
    monkeypatch.setattr(sys, "stdin", given)
    assert list(lines_of_stdin()) == ["z\u00fcrich\n"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8"))
    with pytest.raises(UserError, match="standard input is not UTF-8 text: byte 0xff"):
        list(lines_of_stdin())


def test_doctor_says_what_a_run_would_find_here(capsys, monkeypatch):
    assert main(["doctor"]) == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line[0] != " ")
    assert list(said) == [*CHECKS]
    assert not [finding for finding in said.values() if "unknown: " in finding]
    assert "torch 2" in said["versions"]
    assert "run.precision auto means " in said["precision"]
    monkeypatch.setitem(CHECKS, "memory", lambda: 1 / 0)
    monkeypatch.delitem(CHECKS, "sandbox")  # not tried a second time
    assert main(["doctor"]) == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line[0] != " ")
    assert said["memory"].startswith("unknown: ZeroDivisionError")


def test_doctor_advises_where_something_is_missing(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: "1.0")
    monkeypatch.setattr(doctor, "requires", lambda name: ["torch>=2.11", "absent>=3", 'other>=1; extra == "more"'])
    monkeypatch.setattr(doctor, "installed_version", {"torch": "2.10.0"}.get)
    advice = CHECKS["versions"]().advice
    assert advice == (
        "torch 2.10.0 (torch>=2.11 is needed), absent is missing (absent>=3 is needed): install Proximo again"
    )
    extras = CHECKS["extras"]()
    assert extras == doctor.Finding("none; without more (other>=1)", "pip install 'proximo[NAME]' adds one")
    monkeypatch.setattr("proximo.commands.dry_run.CDLL", lambda name: None)
    assert "check its build and `nvidia-smi`" in CHECKS["device"]().advice


def test_a_settings_file_of_a_run_in_this_folder_is_a_recipe(folder, capsys):
    assert main(["config", "show", write_recipe(folder, SFT)]) == 0
    shown = capsys.readouterr().out
    (folder / "config.resolved.json").write_text(json.dumps(yaml.safe_load(shown)), encoding="utf-8")
    (folder / "mine").write_text(shown, encoding="utf-8")
    for name in ("config.resolved.json", "mine"):
        assert main(["config", "show", name]) == 0
        assert capsys.readouterr().out == shown


def test_ctrl_c_within_a_command_is_no_traceback(monkeypatch, capsys):
    def interrupted(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("proximo.cli.program.typer.main.get_command", lambda app: Refusing(interrupted))
    assert main(["report", "x"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_another_error_of_the_system_keeps_its_traceback(monkeypatch):
    def fail(*given, **options):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("proximo.cli.program.typer.main.get_command", lambda app: Refusing(fail))
    with pytest.raises(OSError, match="Invalid argument"):
        main(["report", "x"])


class Refusing:
    """A command line whose every command fails in the same way."""

    def __init__(self, fail):
        self.main = fail
