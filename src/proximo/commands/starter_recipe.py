"""Makes a first recipe from five answers: a shipped recipe with the user's model, data, reward and machine.

Imports no torch. The questions and the terminal are in cli/starting.py.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proximo.callables import IMPORT_PATH
from proximo.config.loader import as_yaml, read_document
from proximo.config.schema.overrides import Override, apply_overrides
from proximo.trainer_kinds import recipe_kind

TRAINED = {
    "sft": "fine-tune a model on texts",
    "reward": "a reward model from preference pairs",
    "dpo": "a policy from preference pairs, without a reward model",
    "ppo": "a policy against a reward",
    "pipeline": "all three steps from one file of preference pairs: fine-tuning, reward model, PPO",
}
"""Command -> what it trains."""
MACHINES = {
    "cpu": "no accelerator, small steps",
    "mps": "a Mac with a processor of Apple's",
    "gpu": "one GPU with up to 24 GB",
    "large-gpu": "one GPU with 80 GB",
}
VERIFIERS = ("maths", "countdown")
"""Rewards that need no function and no model: `{kind: maths}`."""
LORA = {"rank": 16}
SHARE_OF_PROMPTS = 5
"""A stage of the pipeline's recipe reads at least a fifth of the rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What the user wants to train."""

    train: str
    """A key of TRAINED."""
    model: str
    """Folder or Hub name of the model to start from."""
    data: str
    """File, folder, Hub name or `package.module:function`."""
    reward: str | None
    """For `ppo`: folder or Hub name of a reward model, `package.module:function`, or a name of VERIFIERS."""
    machine: str
    """A key of MACHINES."""


def shipped_answers(train: str) -> Answers:
    """The answers that the shipped recipe stands for, as defaults."""
    tree = read_document(starting_point(train, None)).data
    stage = tree["sft"] if train == "pipeline" else tree
    return Answers(
        train=train,
        model=stage["policy" if train == "ppo" else "model"]["path"],
        data=stage["data"]["sources"][0]["path"],
        reward=tree["reward"][0]["path"] if train == "ppo" else None,
        machine="gpu",
    )


def starting_point(train: str, reward: str | None) -> str:
    """The name of the shipped recipe to start from."""
    if train == "pipeline":
        return "qwen2.5-0.5b-rlhf"
    return "ppo-function" if train == "ppo" and not is_reward_model(reward or "") else train


def is_reward_model(reward: str) -> bool:
    """Whether this answer names a model."""
    return reward not in VERIFIERS and not IMPORT_PATH.fullmatch(reward)


def starter_recipe(answers: Answers, file: Path) -> str:
    """The text of the recipe. `file` is where it will lie: its name is that of the run folder too."""
    base = starting_point(answers.train, answers.reward)
    document = read_document(base)
    changes = {"run.folder": f"runs/{file.stem}", **dict(_changes(answers, document.data))}
    overrides = [Override(text=key, path=tuple(key.split(".")), value=value) for key, value in changes.items()]
    tree = apply_overrides(document.data, overrides, recipe_kind(answers.train).schema)
    plain = json.loads(json.dumps(tree))  # without objects in two places, which YAML would give a name
    commands = {
        f"proximo {answers.train} {file} --dry-run": "what it would do, in numbers",
        f"proximo plan {file}": "memory and work, before anything is loaded",
        f"proximo {answers.train} {file}": "start it",
    }
    width = max(map(len, commands))
    return "\n".join(
        [
            f"# {answers.train}: {TRAINED[answers.train]} ({MACHINES[answers.machine]})",
            "#",
            f"# From the shipped recipe {base}: `proximo recipes show {base}` says why.",
            f"# Every default: `proximo config show {file}`. The keys: docs/configuration.md.",
            "#",
            *(f"# {command:<{width}}   {what}" for command, what in commands.items()),
            as_yaml(plain),
        ]
    )


def _changes(answers: Answers, base: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Key -> value, where the recipe is to differ from the shipped one."""
    is_pipeline = answers.train == "pipeline"
    if answers.train != "ppo":
        yield "sft.model.path" if is_pipeline else "model.path", answers.model
    source = {"function" if IMPORT_PATH.fullmatch(answers.data) else "path": answers.data}
    rows = _num_rows(answers.data)
    for stage in ("sft.", "reward.", "ppo.") if is_pipeline else ("",):
        data = base[stage.rstrip(".")]["data"] if stage else base["data"]
        yield f"{stage}data.sources", [source]
        if rows is not None:
            part = rows // SHARE_OF_PROMPTS if is_pipeline else rows
            yield f"{stage}data.held_out_rows", min(data["held_out_rows"], max(part // 10, 1))
    if answers.train == "ppo":
        yield "reward", [_reward_source(answers.reward or "")]
    yield from _for_machine(answers, base)


def _num_rows(data: str) -> int | None:
    """Rows of a local file with one row per line; None for other data, whose rows would have to be read."""
    path = Path(data).expanduser()
    if path.suffix not in (".jsonl", ".ndjson") or not path.is_file():
        return None
    with path.open("rb") as lines:
        return sum(not line.isspace() for line in lines)


def _reward_source(reward: str) -> dict[str, Any]:
    if reward in VERIFIERS:
        return {"kind": reward}
    return {"kind": "model", "path": reward} if is_reward_model(reward) else {"kind": "function", "function": reward}


def _for_machine(answers: Answers, base: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Where it runs; adapters where memory is short, with the learning rates that they want; small steps on a CPU."""
    yield "run.device", answers.machine if answers.machine in ("cpu", "mps") else "cuda"
    if answers.train == "pipeline":
        if answers.machine == "cpu":
            yield from (
                (f"{stage}.{key}", value) for stage in ("sft", "reward", "ppo") for key, value in SMALL_STEPS[stage]
            )
        return
    if answers.machine == "cpu":
        yield from SMALL_STEPS[answers.train]
    if answers.train == "ppo":
        lora = None if answers.machine == "large-gpu" else LORA
        kept = {"activation_checkpointing": True}
        yield "policy", {"path": answers.model, **kept, **({} if lora is None else {"lora": lora})}
        yield "value", {"init_from": "policy", **kept, **({} if lora is None else {"lora": lora})}
        yield "ppo.policy_optimizer", {"learning_rate": 1e-6 if lora is None else 1e-5}
        yield "ppo.value_optimizer", {"learning_rate": 1e-5 if lora is None else 2e-5}
        if answers.machine != "cpu":
            yield "data.max_prompt_tokens", 512
            yield "ppo.rollout.max_new_tokens", 256
    elif answers.machine != "large-gpu":
        yield "model.lora", LORA
        yield f"{answers.train}.optimizer.learning_rate", 10 * base[answers.train]["optimizer"]["learning_rate"]


SMALL_STEPS: Mapping[str, tuple[tuple[str, int], ...]] = {
    "sft": (("sft.examples_per_step", 8), ("data.max_tokens", 512)),
    "reward": (("reward.pairs_per_step", 16), ("data.max_tokens", 512)),
    "dpo": (("dpo.pairs_per_step", 16), ("data.max_tokens", 512)),
    "ppo": (("ppo.prompts_per_step", 16), ("ppo.rollout.max_new_tokens", 64), ("data.max_prompt_tokens", 256)),
}
"""For a CPU: stage -> keys with values below those of the shipped recipes."""
