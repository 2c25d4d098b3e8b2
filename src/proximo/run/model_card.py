"""The model card of a trained model: what it is, how it was trained, what changed.

A card reveals nothing about the user's machine: it shows only the last part of a path, and the front matter names a
base model or a data set only if it is on the Hub.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from proximo.checkpoint import atomic
from proximo.checkpoint.run_folder import CHECKPOINTS
from proximo.checkpoint.store import CheckpointStore
from proximo.config.data import DataConfig
from proximo.config.recipe import TrainerRecipe
from proximo.config.run import ScalarModelConfig
from proximo.errors import RunFolderError
from proximo.metrics.catalogue import trainer_by_metrics
from proximo.metrics.report.run_summary import before_after
from proximo.metrics.run_files import Run, read_run
from proximo.run.checkpoint_lookup import saved_recipe
from proximo.run.preflight import MODEL_FILES, Input, data_inputs, model_input, reward_inputs
from proximo.trainer_kinds import trainer_of

CARD = "README.md"
SCALAR_ROLES = ("value", "reward")
LIMITS = """## Limits

- The figures above are of the run's own data. Nothing here was measured about truth, harm or bias.
- Licence and limits of the model that it started from, and of the data, hold for it too."""
WHAT = {
    "policy": "A language model",
    "average": "A language model, the moving average of a policy in training",
    "reference": "The reference model of a training run, as it was left",
    "reward": "A reward model, which scores answers",
    "value": "The value model of a training run: the score that it expected after each token",
}


def model_card(run_folder: Path, *, role: str, step: int, is_adapter: bool) -> str:
    """The card of the model of `role` at `step`. Facts that the run folder lacks are left out."""
    run = read_run(run_folder)
    run = replace(run, lines=tuple(line for line in run.lines if line["step"] <= step))
    try:
        recipe = saved_recipe(run_folder)
    except RunFolderError:  # damaged or from another version, but the model is still good
        recipe = None
    parts = [
        f"---\n{_front_matter(run, recipe, role, is_adapter).to_yaml()}\n---",
        f"# {run.name}",
        f"{WHAT.get(role, WHAT['policy'])}, from step {step:,} of {_stage(run)} with Proximo.",
        *_training(recipe, run),
        *_table(run),
        LIMITS,
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(run: Run, recipe: TrainerRecipe | None, role: str, is_adapter: bool) -> ModelCardData:
    trainer = trainer_by_metrics(run.names)
    tags = ["proximo", *([trainer.name] if trainer else []), *(["lora"] if is_adapter else [])]
    base = _base(recipe, role) if recipe else None
    data = [each.name for each in _data_inputs(recipe) if each.kind == "Hub"] if recipe else []
    return ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=_task(role),
        tags=[*tags, "reward-model"] if role == "reward" else tags,
        base_model=base.name if base is not None and base.kind == "Hub" else None,
        datasets=data or None,
    )


def _task(role: str) -> str:
    return "text-classification" if role in SCALAR_ROLES else "text-generation"


def _base(recipe: TrainerRecipe, role: str) -> Input | None:
    """The model from which the role was initialised; None if that was another model of the run."""
    models = recipe.models()
    section = models.get(role, next(iter(models.values())))
    if isinstance(section, ScalarModelConfig) and section.init_from != "path":
        return None
    return model_input(section, role)


def _stage(run: Run) -> str:
    trainer = trainer_by_metrics(run.names)
    return trainer.task if trainer else "a training run"


def _training(recipe: TrainerRecipe | None, run: Run) -> Iterator[str]:
    if recipe is None:
        return
    yield "## How it was trained"
    trained = next(iter(recipe.models().values()))
    lines = [f"- Started from: {_public(model_input(trained, 'model'))}"]
    if trained.lora is not None:
        lines.append(f"- LoRA adapter of rank {trained.lora.rank}, alpha {trained.lora.alpha:g}")
    if (reference := recipe.models().get("reference")) is not None:
        lines.append(f"- Reference, which it was compared with: {_public(model_input(reference, 'reference'))}")
    lines.append(f"- Data: {_listed(_data_inputs(recipe))}")
    for source in recipe.reward_sources():
        first, *_ = reward_inputs(source, "reward")
        lines.append(f"- Reward: {_cell(source.name)} ({_public(first)}), weight {source.weight:g}")
    yield "\n".join(lines)
    rows = [(key, _value(recipe, key)) for key in (*trainer_of(recipe).card_settings, "run.precision", "run.seed")]
    rows = [(key, repr(value) if key.endswith("separator") else value) for key, value in rows]
    rows += [(package, (run.environment or {}).get(package)) for package in ("torch", "transformers")]
    yield _markdown(("setting", "value"), [(f"`{key}`", _cell(value)) for key, value in rows if value is not None])


def _data_inputs(recipe: TrainerRecipe) -> list[Input]:
    """Inputs of the first data section; PTX texts are left out."""
    sections = [(key, each) for key, each in recipe.sections().items() if isinstance(each, DataConfig)]
    return [each for key, section in sections[:1] for each in data_inputs(section, key)]


def _listed(found: Sequence[Input]) -> str:
    return ", ".join(dict.fromkeys(_public(each) for each in found))


def _public(given: Input) -> str:
    """Names of Hub repositories, functions and verifiers in full; the last part of a path."""
    match given.kind:
        case "Hub" | "function" | "verifier":
            return f"`{_cell(given.name)}`"
        case "random start":
            return f"random weights ({_cell(given.name)})"
    return f"`{_cell(Path(given.name).name)}` (a {given.kind} of its author)"


def _value(recipe: TrainerRecipe, key: str) -> Any:
    value: Any = recipe
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def _table(run: Run) -> Iterator[str]:
    rows = before_after(run)
    if not rows:
        return
    yield "## What changed"
    yield "Measured by the run itself, on held-out data where it had any."
    yield _markdown(
        ("", "before", "after", "change", "unit", "metric"),
        [
            (
                row.label,
                row.shown_before and f"{row.shown_before} (step {row.first_step})",
                f"{row.shown_after} (step {row.last_step})",
                row.change,
                row.unit,
                f"`{row.name}`",
            )
            for row in rows
        ],
    )


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").replace("`", "'").split())


def write_card(model: Path, run_folder: Path, *, role: str, step: int) -> None:
    """Write the card of the model of `role` at `step` into its folder `model`, unless there is one."""
    if (model / CARD).exists():
        return
    is_adapter = (model / "adapter_config.json").is_file()
    text = model_card(run_folder, role=role, step=step, is_adapter=is_adapter)
    atomic.write_bytes_atomically(model / CARD, text.encode())


def write_final_cards(run_folder: Path) -> None:
    """Write a card for every model of the run's latest checkpoint."""
    checkpoint = CheckpointStore(run_folder / CHECKPOINTS).latest()
    if checkpoint is None:
        return
    for model in sorted(path for path in checkpoint.folder.iterdir() if path.is_dir()):
        atomic.clear_temporaries(model)
        if any((model / file).is_file() for file in MODEL_FILES):
            write_card(model, run_folder, role=model.name, step=checkpoint.step)
