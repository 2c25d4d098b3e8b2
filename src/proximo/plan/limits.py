"""Options that `proximo plan` refuses or leaves out. Whether a recipe can run: run/preflight.py."""

from collections.abc import Iterator

from proximo.config.recipe import TrainerRecipe
from proximo.errors import ConfigError


def check_plannable(recipe: TrainerRecipe) -> None:
    """Raises ConfigError if a model has quantised weights."""
    for key, model in recipe.models().items():
        if model.quantisation != "none":
            raise ConfigError(
                f"no plan for {key}.quantisation {model.quantisation}: what bitsandbytes holds and expands in its "
                f"products cannot be profiled without weights; plan with {key}.quantisation=none for what the same "
                "run takes with float32 weights"
            )


def notes_on(recipe: TrainerRecipe) -> Iterator[str]:
    """One sentence for each option of the recipe that the plan does not count."""
    if recipe.run.compile != "none":
        yield f"run.compile {recipe.run.compile} is left out: passes are counted as they are without it"
    if any(optimizer.kind == "adamw_paged_8bit" for optimizer in recipe.optimizers().values()):
        yield "the moments of adamw_paged_8bit are counted, though CUDA may move them to the host"
