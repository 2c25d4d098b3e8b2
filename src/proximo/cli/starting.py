"""`proximo init`: asks what to train, and writes a first recipe. What it holds: commands/starter_recipe.py."""

import sys
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from proximo.checkpoint.atomic import write_bytes_atomically
from proximo.cli import completion
from proximo.errors import ConfigError, UserError
from proximo.working_directory import functions_of_the_working_directory

if TYPE_CHECKING:  # importing the schemas would slow down --help
    from proximo.commands.starter_recipe import Answers

Machine = Literal["cpu", "mps", "gpu", "large-gpu"]
EXAMPLE = "proximo init my.yaml --train sft --model Qwen/Qwen2.5-0.5B --data texts.jsonl --machine gpu"


def add_to(app: typer.Typer) -> None:
    """Add `proximo init` to the command line."""
    app.command()(init)


def init(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The recipe to write; default TRAIN.yaml.")
    ] = None,
    *,
    train: Annotated[
        str | None,
        typer.Option(help="The command that will train: sft, ppo or another.", autocompletion=completion.trained),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model to start from: a folder or a Hub name.")] = None,
    data: Annotated[str | None, typer.Option(help="A file, a folder, a Hub name or module:function.")] = None,
    reward: Annotated[
        str | None,
        typer.Option(help="With ppo: a reward model (folder or Hub name), module:function, maths or countdown."),
    ] = None,
    machine: Annotated[Machine | None, typer.Option(help="What it will run on; gpu: up to 24 GB.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a first recipe: ask what to train, from which model, on which data, with which reward, on what machine.

    \b
    proximo init                              asks all five
    proximo init my.yaml --train ppo          asks the other four
    proximo init my.yaml --train ppo --model models/sft --data prompts.jsonl --reward models/reward --machine gpu

    It is a shipped recipe with your values. Without a terminal, every answer must be an option.
    """
    given = {"train": train, "model": model, "data": data, "reward": reward, "machine": machine}
    asks = sys.stdin.isatty()
    _check(given, asks=asks)
    kind = train or _choose("train")
    target = _target(file, kind, overwrite=overwrite, asks=asks)
    from proximo.commands.checked_recipe import checked
    from proximo.commands.starter_recipe import starter_recipe
    from proximo.config.loader import load_recipe
    from proximo.config.schema.positioned_yaml import parse_document

    text = starter_recipe(_answers(kind, given), target)
    document = parse_document(text, str(target))
    load_recipe(kind, document)
    problem = None
    with functions_of_the_working_directory():
        try:
            checked(kind, document, ())
        except UserError as error:
            problem = str(error)
    try:
        write_bytes_atomically(target, text.encode())
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}") from error
    if problem is not None:
        print(f"note: before it can run: {problem}", file=sys.stderr)
    print(f"{target}: change it, then try `proximo {kind} {quote(str(target))} --dry-run`")


def _check(given: Mapping[str, str | None], *, asks: bool) -> None:
    """Raises UserError for options that are missing without a terminal, or that do not go together."""
    from proximo.commands.starter_recipe import shipped_answers, trained

    train = given["train"]
    if train is not None and train not in trained():
        raise UserError(f"--train is one of {', '.join(trained())}, got {train!r}")
    wants_reward = train is not None and shipped_answers(train).reward is not None
    if given["reward"] is not None and train is not None and not wants_reward:
        raise UserError(f"--train {train} takes no --reward: leave it out")
    missing = [f"--{name}" for name, value in given.items() if value is None and (name != "reward" or wants_reward)]
    if missing and not asks:
        raise UserError(f"there is no terminal to ask at: give {', '.join(missing)} as well, as in `{EXAMPLE}`")


def _target(file: Path | None, train: str, *, overwrite: bool, asks: bool) -> Path:
    """The file to write. Raises ConfigError if it exists and may not be replaced."""
    target = file or Path(f"{train}.yaml")
    target = target / f"{train}.yaml" if target.is_dir() else target
    if target.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"a recipe's name ends in .yaml, got {target}")
    if not target.parent.is_dir():
        raise ConfigError(f"there is no folder {target.parent} to write {target.name} to")
    if target.exists() and not overwrite and not (asks and typer.confirm(f"{target} exists: replace it?")):
        raise ConfigError(f"{target} exists and is left as it is: give another name, or --overwrite")
    return target


def _answers(train: str, given: Mapping[str, str | None]) -> "Answers":
    """The answers, with those that are missing asked for. What the shipped recipe has is the default."""
    from proximo.commands.preflight_warnings import device_problem
    from proximo.commands.starter_recipe import Answers, shipped_answers

    shipped = shipped_answers(train)
    model, data, reward = given["model"], given["data"], given["reward"]
    model = model or typer.prompt("From which model? A folder or a Hub name", default=shipped.model)
    data = data or typer.prompt("On which data? A file, a folder, a Hub name or module:function", default=shipped.data)
    if shipped.reward is not None and reward is None:
        reward = typer.prompt(
            "With which reward? A reward model, module:function, maths or countdown", default=shipped.reward
        )
    machine = given["machine"] or _choose("machine", default="cpu" if device_problem("cuda") else "gpu")
    return Answers(
        train=train,
        model=model,
        data=data,
        reward=reward if shipped.reward is not None else None,
        machine=machine,
    )


def _choose(name: Literal["train", "machine"], default: str | None = None) -> str:
    """Ask for one of the names, until one of them comes."""
    from proximo.commands.starter_recipe import MACHINES, trained

    question, choices = {"train": ("What to train?", trained()), "machine": ("On what machine?", MACHINES)}[name]
    print(question)
    for choice, meaning in choices.items():
        print(f"  {choice:<{max(map(len, choices))}}  {meaning}")
    while (answer := typer.prompt("Its name", default=default)) not in choices:
        print(f"one of {', '.join(choices)} is wanted, got {answer!r}")
    return answer
