"""Tiny runs of the trainers as recipes: models of width 16, characters for tokens. Not the interrupting of them.

Every recipe takes five steps and saves after the second, the fourth and the fifth, so that the last save prunes.
Nothing is constant: learning rates, the KL coefficient, the number of micro-batches; whatever a resume forgets shows.
"""

import json
import random
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from builders import tiny_language_model, tiny_tokenizer
from proximo.config.recipe import TrainerRecipe
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.pretrained.saving import save_pretrained
from proximo.models.scalar import HeadStart, mark_steps, scalar_from_language_model
from proximo.run.loop import run_trainer
from proximo.run.options import RunOptions
from proximo.trainer_kinds import recipe_kind

Kind = Literal["sft", "reward", "prm", "dpo", "kto", "ppo"]
KINDS: tuple[Kind, ...] = ("sft", "reward", "prm", "dpo", "kto", "ppo")
NUM_STEPS = 5
SAVED_STEPS = (2, 4, 5)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2_WITH_DROPOUT = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 64,
    "resid_pdrop": 0.2,
    "embd_pdrop": 0.2,
    "attn_pdrop": 0.2,
}
LORA = {"rank": 2, "alpha": 4.0}


def make_inputs(place: Path) -> Path:
    """Write a tokenizer, a reward model and data for all trainers below `place`; returns it."""
    place.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer().save_pretrained(place / "tokenizer")
    scalar = scalar_from_language_model(
        LanguageModel(tiny_language_model(seed=1, num_hidden_layers=1)), HeadStart.NORMAL, seed=2
    )
    save_pretrained(scalar.model, place / "reward_model")
    tiny_tokenizer().save_pretrained(place / "reward_model")
    mark_steps(scalar, " ")
    save_pretrained(scalar.model, place / "step_model")
    tiny_tokenizer().save_pretrained(place / "step_model")
    language_model = tiny_language_model(seed=3, num_hidden_layers=1)
    save_pretrained(language_model, place / "language_model")
    _save_reward_adapter(language_model, place)
    tiny_tokenizer().save_pretrained(place / "language_model")
    draw = random.Random(4)
    rows: list[dict[str, Any]] = [
        {"prompt": _words(draw, 2), "response": _words(draw, 3), "chosen": _words(draw, 3), "rejected": _words(draw, 2)}
        | {"label": number % 2 == 0}
        for number in range(12)
    ]
    for row in rows:
        # A text of three words in steps of a word each, of which those with a vowel at their end are right.
        row["steps"] = row["response"].split()
        row["labels"] = [word[-1] in "ae" for word in row["steps"]]
    for name, columns in COLUMNS.items():
        lines = [json.dumps({column: row[column] for column in columns}) for row in rows]
        (place / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return place


def _save_reward_adapter(base: PreTrainedModel, place: Path) -> None:
    """A reward model that is an adapter and a head on `language_model`."""
    scalar = scalar_from_language_model(LanguageModel(base), HeadStart.NORMAL, seed=4)
    scalar.base.name_or_path = str(place / "language_model")
    save_pretrained(scalar.with_adapter(LoRAOptions(rank=2, seed=5)).model, place / "reward_adapter")
    tiny_tokenizer().save_pretrained(place / "reward_adapter")


COLUMNS = {
    "texts": ("prompt", "response"),
    "pairs": ("prompt", "chosen", "rejected"),
    "steps": ("prompt", "steps", "labels"),
    "labelled": ("prompt", "response", "label"),
    "prompts": ("prompt",),
}


def _words(draw: random.Random, count: int) -> str:
    return " ".join("".join(draw.choices("abcdefgh", k=draw.randint(1, 4))) for _ in range(count))


def share_of_vowels(
    prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> list[float]:
    """A reward whose best response is plain to see."""
    del prompts, metadata
    return [sum(letter in "aeiou" for letter in text) / (len(text) + 1) for text in responses]


def recipe_of(kind: Kind, place: Path) -> dict[str, Any]:
    """The recipe of a trainer over the inputs in `place`; its run folder is `place/run`."""
    run = {
        "folder": str(place / "run"),
        "seed": 5,
        "device": "cpu",
        "num_threads": 1,
        "save_every_steps": 2,
        "evaluate_every_steps": 2,
        "samples_per_step": 1,
        "tensorboard": False,
    }
    sections = _ppo(place) if kind == "ppo" else _supervised(kind, place)
    return {"run": run, "tokenizer": {"path": str(place / "tokenizer")}, **sections}


SUPERVISED = {
    "sft": ("texts", "examples_per_step", 40),
    "reward": ("pairs", "pairs_per_step", 60),
    "prm": ("steps", "solutions_per_step", 40),
    "dpo": ("pairs", "pairs_per_step", 60),
    "kto": ("labelled", "examples_per_step", 40),
}
"""File of the data, name of the size of a step, tokens of a micro-batch."""


def _supervised(kind: Kind, place: Path) -> dict[str, Any]:
    file, size, tokens = SUPERVISED[kind]
    return {
        "model": {"config": LLAMA},
        "data": {"sources": [{"path": str(place / f"{file}.jsonl")}], "held_out_rows": 2, "max_tokens": 48},
        kind: {"num_epochs": 2, size: 4, "tokens_per_microbatch": tokens, "optimizer": _optimizer()},
    }


def _ppo(place: Path) -> dict[str, Any]:
    return {
        "model": {"config": LLAMA},
        "value": {"init_from": "reward"},
        "data": {"sources": [{"path": str(place / "prompts.jsonl")}], "held_out_rows": 2, "max_prompt_tokens": 12},
        "reward": [
            {"kind": "model", "path": str(place / "reward_model")},
            {"kind": "function", "function": "tiny_runs:share_of_vowels", "weight": 4.0},
        ],
        "gold": {"kind": "function", "name": "gold", "function": "tiny_runs:share_of_vowels"},
        "ppo": {
            "num_steps": NUM_STEPS,
            "prompts_per_step": 4,
            "epochs_per_step": 1,
            "minibatch_responses": 3,
            "tokens_per_microbatch": 40,
            "kl": {"coefficient": 0.1, "adaptive": {"target": 0.5, "horizon": 20}},
            "rollout": {"max_new_tokens": 4, "max_num_seqs": 4},
            "policy_optimizer": _optimizer(),
            "value_optimizer": _optimizer(),
        },
    }


def _optimizer() -> dict[str, Any]:
    return {"learning_rate": 1e-2, "schedule": "cosine", "warmup_updates": 2, "weight_decay": 0.01}


def changed(recipe: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe with values at dotted keys replaced; for adapters, a saved base and what was trained on it."""
    copy = json.loads(json.dumps(recipe))
    for key, value in deepcopy(dict(changes)).items():
        *above, last = key.split(".")
        section = copy
        for name in above:
            section = section[int(name)] if isinstance(section, list) else section.setdefault(name, {})
        section[int(last) if isinstance(section, list) else last] = value
    model = copy["model"]
    if "lora" in model and model.pop("config", None) is not None:
        model["path"] = str(Path(copy["tokenizer"]["path"]).with_name("language_model"))
    for source in copy["reward"] if isinstance(copy.get("reward"), list) else ():
        if source.get("share_base"):
            source["path"] = str(Path(source["path"]).with_name("reward_adapter"))
    return copy


def run(kind: Kind, recipe: Mapping[str, Any], options: RunOptions) -> int:
    """Run the recipe in this process, as the command line would; returns the exit status."""
    schema = recipe_kind(kind).schema
    assert issubclass(schema, TrainerRecipe)
    return run_trainer(schema.model_validate(recipe), options)


IN_AN_ENVIRONMENT: dict[str, Any] = {
    "environment": {"path": "example_environments:Riddle", "max_turns": 3, "max_tokens": 60, "workers": 3},
    "reward": [],
    "value": {"init_from": "policy"},
}
"""Changes of a recipe of PPO."""
