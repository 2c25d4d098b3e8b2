"""A recipe as it looks in the output cell of a notebook."""

from proximo.config.recipe import Recipe
from proximo.counts import count_of
from proximo.errors import redacted
from proximo.metrics.notebook.html import Card
from proximo.metrics.report.head import model_of, task_of
from proximo.metrics.run_files import setting
from proximo.trainer_kinds import recipe_kinds, trainer_of


def recipe_card(recipe: Recipe, *, state: str) -> Card:
    """Folder, model, task and length of each stage. `state`: of the run in the folder."""
    kind = next((each.name for each in recipe_kinds() if each.schema is type(recipe)), "own")
    facts = [("Folder", recipe.run.folder), ("Run", state)]
    stages = [stage for _, stage in recipe.given_stages()]
    for stage in stages:
        trainer, config = trainer_of(stage), stage.model_dump(mode="json")
        length = _length(setting(config, trainer.name, "num_steps"), setting(config, trainer.name, "num_epochs"))
        parts = [task_of(config, trainer), f"model: {model_of(config)}", length]
        facts.append((trainer.short_title, redacted("; ".join(part for part in parts if part))))
    return Card(title=f"Training: {kind}", facts=facts)


def _length(steps: int | None, epochs: float | None) -> str:
    if steps:
        return count_of(steps, "step")
    return count_of(epochs, "epoch") if epochs else ""
