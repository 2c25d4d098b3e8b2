"""The commands and Python blocks of the pages, run as they stand there, with a tiny model in place of each real one.

Every `sh` block of a page is run in one folder, from the top of the page to its end. Training commands get overrides
that make them small; `TINY` has them all.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml
from pages import PAGES, ROOT, blocks

from builders import tiny_language_model, tiny_model_with_pictures, tiny_tokenizer
from proximo.cli import main
from proximo.config.loader import load_recipe, resolved_yaml
from proximo.trainer_kinds import recognise

HUB_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
NOT_OURS = ("make", "source", "pip")
"""Programs whose commands are not run: they set up the machine."""
MINUTES = ["proximo", "pipeline", "demo", "--overwrite"]
"""The demo itself; its tiny form is run instead."""
QUOTED = re.compile(r"\$'([^']*)'")
"""What the shell replaces escapes in, such as the end of a line."""
README = ROOT / "README.md"
SHELL_PAGES = ("getting-started", "pipeline", "dpo")
SLOW_PAGES = ("README", "environments-tutorial")
COMMON = ["run.precision=float32", "run.device=cpu", "run.tensorboard=false"]
PPO = [
    *COMMON,
    *["ppo.num_steps=1", "ppo.prompts_per_step=4", "ppo.responses_per_prompt=1", "ppo.rollout.max_new_tokens=4"],
    *["data.held_out_rows=2", "data.max_prompt_tokens=60"],
]
TINY = {
    "sft": [*COMMON, "model.path=tiny", "data.held_out_rows=4", "data.max_tokens=60", "sft.examples_per_step=8"],
    "reward": [*COMMON, "data.held_out_rows=4", "data.max_tokens=60", "reward.pairs_per_step=8"],
    "dpo": [*COMMON, "data.held_out_rows=4", "data.max_tokens=60", "dpo.pairs_per_step=8"],
    "ppo": PPO,
    "ppo-function": [*PPO, "model.path=tiny"],
    "lift.yaml": [
        *("run.tensorboard=false", "sft.model.config.hidden_size=16", "sft.model.config.intermediate_size=16"),
        *("sft.data.held_out_rows=4", "ppo.data.held_out_rows=4", "ppo.environment.workers=2"),
        *("ppo.environment.num_rows=40", "ppo.ppo.num_steps=1", "ppo.ppo.prompts_per_step=8"),
    ],
}
"""By recipe: what makes it run in a second."""


def write_rows(path: Path, rows: Sequence[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder with the files that the pages speak of, and the tiny model."""
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "tiny")
    tiny_model_with_pictures().save_pretrained(tmp_path / "google/gemma-3-4b-it")
    tiny_tokenizer().save_pretrained(tmp_path / "google/gemma-3-4b-it")
    asked = [f"add {number} and {number}: " for number in range(16)]
    write_rows(tmp_path / "texts.jsonl", [{"prompt": text, "response": "an answer"} for text in asked])
    write_rows(tmp_path / "pairs.jsonl", [{"prompt": text, "chosen": "yes", "rejected": "no"} for text in asked])
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": text} for text in asked])
    (tmp_path / "mine.csv").write_text("question,answer\n" + "".join(f"{text},1\n" for text in asked))
    yield tmp_path
    for name in ("my_reward", "lift"):
        sys.modules.pop(name, None)


def save_tiny(path: Path) -> None:
    tiny_language_model(max_position_embeddings=2048).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)


def commands(page: Path) -> list[list[str]]:
    """The lines of all sh blocks as arguments, comments left out."""
    lines = [line for block in blocks(page, "sh") for line in block.text.splitlines() if line.strip()]
    plain = [QUOTED.sub(lambda found: shlex.quote(found[1].replace(r"\n", "\n")), line) for line in lines]
    assert not any("$" in line for line in plain), "no shell runs them"
    return [shlex.split(line, comments=True) for line in plain]


def small(arguments: list[str]) -> list[str]:
    """The same command with its tiny overrides, before its options."""
    command, recipe = arguments[0], arguments[1] if len(arguments) > 1 else ""
    if arguments[:2] == ["pipeline", "demo"]:
        again = [] if arguments[2:] == MINUTES[3:] else ["--dry-run"]
        return ["pipeline", "tiny", *(["run.folder=runs/demo"] if not again else []), *arguments[2:], *again]
    if command not in ("sft", "reward", "dpo", "kto", "ppo") and recipe not in TINY:
        return arguments
    if "--dry-run" in arguments:
        # It counts the rows of the small files, and knows how much the tiny model can read.
        return [*arguments, "data.held_out_rows=2", *(["ppo.rollout.max_new_tokens=4"] if command == "ppo" else [])]
    given = {argument.partition("=")[0] for argument in arguments}
    # A model that the page made is kept; sizes are replaced, as the last of two values holds.
    extra = [each for each in TINY[recipe] if not (each.startswith("model.path") and given & {"model", "model.path"})]
    return [*arguments, *extra]


def page_named(stem: str) -> Path:
    return README if stem == "README" else ROOT / "docs" / f"{stem}.md"


def write_files(page: Path, folder: Path) -> None:
    """Python blocks that begin with the name of a file are that file."""
    for block in blocks(page, "python"):
        name = re.match(r"# (\w+\.py)\n", block.text)
        if name:
            (folder / name[1]).write_text(block.text)


@pytest.mark.parametrize("stem", [*SHELL_PAGES, *(pytest.param(each, marks=pytest.mark.soak) for each in SLOW_PAGES)])
def test_the_commands_of_a_page_run_one_after_the_other(
    stem: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.nice", lambda increment: increment)
    write_files(page_named(stem), folder)
    for words in commands(page_named(stem)):
        if words[0] in NOT_OURS or words[1:3] == ["pipeline", "tiny" if stem != "README" else "demo"]:
            continue
        assert words[0] == "proximo", words
        assert main(small(words[1:])) == 0, words


SIZES = (
    "vocab_size|hidden_size|intermediate_size|num_hidden_layers|num_attention_heads|num_key_value_heads|num_rows|"
    "held_out_rows|num_steps|prompts_per_step|num_minibatches|max_new_tokens|folder"
)


def test_the_tiny_recipe_is_the_demo_with_smaller_sizes_and_nothing_else_changed() -> None:
    """In `resolved_yaml` every setting stands on a line of its own."""
    demo, tiny = (resolved_yaml(load_recipe("pipeline", name).recipe).splitlines() for name in ("demo", "tiny"))
    assert len(demo) == len(tiny)
    changed = [(before, after) for before, after in zip(demo, tiny, strict=True) if before != after]
    assert changed
    for before, after in changed:
        assert re.fullmatch(rf" *(train_)?({SIZES}): .*", before), before
        assert before.partition(":")[0] == after.partition(":")[0]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_the_python_blocks_of_a_page_are_one_session_that_runs(
    page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(page, folder)
    monkeypatch.syspath_prepend(folder)
    namespace: dict = {}
    for block in blocks(page, "python"):
        code = block.text.replace(HUB_MODEL, str(folder / "tiny"))
        exec(compile(code, f"{page.name}, line {block.line}", "exec"), namespace)
    assert namespace.keys() > {"__builtins__"}, "the session defined nothing"


SECTIONS = """
run: {folder: runs/page}
model: {path: owner/model}
data: {sources: [{path: owner/prompts}]}
reward: [{kind: model, path: owner/reward}]
"""
"""What a part of a PPO recipe on a page is put into."""


@pytest.mark.parametrize(
    "stem",
    [
        *("code", "memory", "pipeline", "rewards", "trackers", "text-rewards", "remote-rewards", "verifiable"),
        *("grpo-trainer", "environments", "environments-tutorial"),
        *("coming-from/torchtune", "coming-from/areal", "coming-from/deepspeed-chat"),
    ],
)
def test_the_recipes_of_a_page_are_valid(stem: str, folder: Path) -> None:
    """Whole ones as they are, parts of one in the place that they belong to."""
    texts = [block.text for block in blocks(page_named(stem), "yaml")]
    assert texts
    for text in texts:
        given = yaml.safe_load(text)
        around = yaml.safe_load(SECTIONS)
        if "environment" in given:
            del around["reward"]  # an environment gives its own, and takes no reward model
        whole = given if "run" in given else {**around, **given}
        (folder / "page.yaml").write_text(yaml.safe_dump(whole))
        kind = recognise(whole)
        assert kind is not None, text
        assert load_recipe(kind.name, str(folder / "page.yaml"), ()).recipe
