"""Makes a first recipe from five answers: a shipped recipe with the user's model, data, reward and machine.

Which keys change follows from those that the shipped recipe has, whichever command it is for. Imports no torch. The
questions and the terminal are in cli/starting.py.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proximo.callables import IMPORT_PATH
from proximo.config.loader import as_yaml, read_document
from proximo.config.shipped import shipped_recipes
from proximo.pages import address
from proximo.trainer_kinds import recipe_kinds

MACHINES = {
    "cpu": "no accelerator, small steps",
    "mps": "a Mac with a processor of Apple's",
    "gpu": "one GPU with up to 24 GB",
    "large-gpu": "one GPU with 80 GB",
}
VERIFIERS = ("maths", "countdown")
"""Rewards that need no function and no model: `{kind: maths}`."""
SEVERAL_STAGES = "qwen2.5-0.5b-rlhf"
WITHOUT_REWARD_MODEL = "ppo-function"
ROLES = ("model", "value")
LORA = {"rank": 16}
OF_WHOLE_WEIGHTS = 10
"""An adapter wants a learning rate this many times that of the whole model."""
SMALL_STEPS = {
    "examples_per_step": 8,
    "pairs_per_step": 16,
    "prompts_per_step": 16,
    "max_new_tokens": 64,
    "max_tokens": 512,
    "max_prompt_tokens": 256,
}
"""For a CPU: below the values of the shipped recipes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What the user wants to train."""

    train: str
    """A key of `trained()`."""
    model: str
    """Folder or Hub name of the model to start from."""
    data: str
    """File, folder, Hub name or `package.module:function`."""
    reward: str | None
    """Folder or Hub name of a reward model, `package.module:function`, or a name of VERIFIERS; None where the shipped
    recipe has no reward source to replace."""
    machine: str
    """A key of MACHINES."""


def trained() -> dict[str, str]:
    """Command -> what it does, for the commands that have a shipped recipe to start from."""
    commands = {recipe.command for recipe in shipped_recipes()}
    return {kind.name: kind.help.partition("\n")[0].rstrip(".") for kind in recipe_kinds() if kind.name in commands}


def shipped_answers(train: str) -> Answers:
    """The answers that the shipped recipe stands for, as defaults."""
    tree = _tree(_starting_point(train, None))
    _, stage = _stages(train, tree)[0]
    model = next(stage[role]["path"] for role in ROLES if role in stage)
    reward = tree["reward"][0]["path"] if isinstance(tree.get("reward"), list) else None
    return Answers(train=train, model=model, data=stage["data"]["sources"][0]["path"], reward=reward, machine="gpu")


def starter_recipe(answers: Answers, file: Path) -> str:
    """The text of the recipe. `file` is where it will lie: its name is that of the run folder too."""
    base = _starting_point(answers.train, answers.reward)
    tree = _tree(base)
    tree["run"] |= {
        "folder": f"runs/{file.stem}",
        "device": answers.machine if answers.machine in ("cpu", "mps") else "cuda",
    }
    stages = _stages(answers.train, tree)
    for name, stage in stages:
        _set_model(stage, answers.model)
        stage["data"]["sources"] = [{"function" if IMPORT_PATH.fullmatch(answers.data) else "path": answers.data}]
        _set_adapters(stage, stage[name], wanted=answers.machine != "large-gpu")
        if answers.machine == "cpu":
            if "max_prompt_tokens" not in stage["data"]:
                stage["data"].setdefault("max_tokens", SMALL_STEPS["max_tokens"])
            _make_small(stage["data"])
            _make_small(stage[name])
    if answers.reward is not None:
        tree["reward"] = [_reward_source(answers.reward)]
    commands = {
        f"proximo {answers.train} {file} --dry-run": "what it would do, in numbers",
        f"proximo plan {file}": "memory and work, before anything is loaded",
        f"proximo {answers.train} {file}": "start it",
    }
    width = max(map(len, commands))
    return "\n".join(
        [
            f"# {answers.train}: {answers.model} on {answers.data}, for {MACHINES[answers.machine]}",
            "#",
            f"# From the shipped recipe {base}: `proximo recipes show {base}` says why.",
            f"# Every default: `proximo config show {file}`. The keys: {address('configuration')}.",
            "#",
            *(f"# {command:<{width}}   {what}" for command, what in commands.items()),
            as_yaml(tree),
        ]
    )


def _is_reward_model(reward: str) -> bool:
    return reward not in VERIFIERS and not IMPORT_PATH.fullmatch(reward)


def _starting_point(train: str, reward: str | None) -> str:
    """The name of the shipped recipe to start from."""
    if reward is not None and not _is_reward_model(reward):
        return WITHOUT_REWARD_MODEL
    return train if train in {recipe.name for recipe in shipped_recipes()} else SEVERAL_STAGES


def _tree(name: str) -> dict[str, Any]:
    """The values of a shipped recipe, with no object in two places, which YAML would give a name."""
    return json.loads(json.dumps(read_document(name).data))


def _stages(train: str, tree: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(name of the training section, values) of each stage; the recipe itself where it is one."""
    if "data" in tree:
        return [(train, tree)]
    return [(name, stage) for name, stage in tree.items() if "data" in stage]


def _set_model(stage: dict[str, Any], model: str) -> None:
    """Of the trained model; one from an earlier stage, and a critic from the policy, stay."""
    for role in ROLES:
        if role in stage and not stage[role].get("path", "@").startswith("@"):
            stage[role]["path"] = model


def _set_adapters(stage: dict[str, Any], training: dict[str, Any], *, wanted: bool) -> None:
    """Adapters where memory is short, with their learning rates; PPO's own defaults know which rate is for which."""
    had = any("lora" in stage[role] for role in ROLES if role in stage)
    for role in ROLES:
        if role in stage:
            adapter = stage[role].pop("lora", LORA)
            stage[role] |= {"lora": dict(adapter)} if wanted else {"activation_checkpointing": True}
    if had != wanted:
        for name in [name for name in training if name.endswith("_optimizer")]:
            del training[name]
    if wanted and not had and "optimizer" in training:
        training["optimizer"]["learning_rate"] *= OF_WHOLE_WEIGHTS


def _make_small(section: dict[str, Any]) -> None:
    for key, value in section.items():
        if isinstance(value, dict):
            _make_small(value)
        elif key in SMALL_STEPS:
            section[key] = min(value, SMALL_STEPS[key])


def _reward_source(reward: str) -> dict[str, Any]:
    if reward in VERIFIERS:
        return {"kind": reward}
    return {"kind": "model", "path": reward} if _is_reward_model(reward) else {"kind": "function", "function": reward}
