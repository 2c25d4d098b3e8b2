"""Finds keys of a recipe that have no effect because of another key. They cause a note, not an error."""

from collections.abc import Iterator

from proximo.config.data import DataConfig
from proximo.config.devices import DevicesConfig, unused_devices_keys
from proximo.config.recipe import Recipe, TrainerRecipe
from proximo.config.run import OptimizerConfig
from proximo.config.schema.base import Section
from proximo.trainer_kinds import trainer_of


def ineffective_keys(recipe: Recipe) -> list[str]:
    """One sentence per ineffective key, with its full path and the reason."""
    shared = recipe.devices if "" not in recipe.stages() else DevicesConfig()
    return [
        sentence
        for prefix, stage in recipe.given_stages()
        for sentence in (*_ineffective(stage, prefix), *_ineffective_in_devices(stage, shared, prefix))
    ]


def _ineffective(recipe: TrainerRecipe, prefix: str) -> Iterator[str]:
    data = {key: section for key, section in recipe.sections().items() if isinstance(section, DataConfig)}
    for key, section in data.items():
        yield from _ineffective_in_sources(section, f"{prefix}{key}.")
    for key, section in data.items():
        if reason := nothing_evaluated(section, f"{prefix}{key}"):
            yield from given_keys(recipe.run, ("evaluate_every_steps",), f"{prefix}run.", reason)
        break  # evaluation uses the first data section only
    trained = [each.model for each in recipe.placed_roles() if each.trains and each.model is not None]
    if trained and all(model.activation_checkpointing for model in trained):
        reason = "under activation_checkpointing no layers are compiled"
        yield from given_keys(recipe.run, ("compile",), f"{prefix}run.", reason)
    for key, optimizer in recipe.optimizers().items():
        yield from _ineffective_in_optimizer(optimizer, f"{prefix}{key}.")
    yield from trainer_of(recipe).ineffective_keys(recipe, prefix)


def _ineffective_in_devices(recipe: TrainerRecipe, shared: DevicesConfig, prefix: str) -> Iterator[str]:
    for key, reason in unused_devices_keys(recipe, shared):
        yield f"{prefix}devices.{key} has no effect: {reason}"


def nothing_evaluated(data: DataConfig, key: str) -> str | None:
    """Why evaluation settings have no effect; None if there are held-out rows."""
    if data.held_out_rows or data.evaluation_sources:
        return None
    return f"nothing is evaluated without {key}.held_out_rows or {key}.evaluation_sources"


def _ineffective_in_sources(data: DataConfig, prefix: str) -> Iterator[str]:
    if data.proportions is None:
        yield from given_keys(data, ("split_seed",), prefix, "without proportions nothing is split")
    for index, source in enumerate(data.sources if data.proportions is None else ()):
        yield from given_keys(
            source, ("whole",), f"{prefix}sources.{index}.", "without proportions every source is whole"
        )


def _ineffective_in_optimizer(optimizer: OptimizerConfig, prefix: str) -> Iterator[str]:
    if optimizer.schedule == "constant":
        yield from given_keys(optimizer, ("final_fraction",), prefix, "schedule is constant")


def given_keys(section: Section, keys: tuple[str, ...], prefix: str, reason: str) -> Iterator[str]:
    """One sentence for each of the keys that differs from its default: it has no effect, for this reason.

    Keys that a section of this kind does not have are passed over.
    """
    values = dict(section)
    for key in keys:
        if key in values and values[key] != type(section).model_fields[key].default:
            yield f"{prefix}{key} has no effect: {reason}"
