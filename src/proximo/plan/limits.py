"""What of a recipe no plan can say, and what a plan leaves out. Not whether the recipe can run."""

from collections.abc import Iterator

from proximo.config.recipe import TrainerRecipe
from proximo.errors import ConfigError


def check_plannable(recipe: TrainerRecipe) -> None:
    """Raises ConfigError for weights of few bits."""
    for key, model in recipe.models().items():
        if model.quantisation != "none":
            raise ConfigError(
                f"no plan for {key}.quantisation {model.quantisation}: what bitsandbytes holds and expands in its "
                f"products cannot be rehearsed without weights; plan with {key}.quantisation=none for what the same "
                "run takes with float32 weights"
            )


def notes_on(recipe: TrainerRecipe) -> Iterator[str]:
    """One sentence for each option that the numbers of the plan leave out."""
    if recipe.run.compile != "none":
        yield f"run.compile {recipe.run.compile} is left out: passes are counted as they are without it"
    if any(optimizer.kind == "adamw_paged_8bit" for optimizer in recipe.optimizers().values()):
        yield "the moments of adamw_paged_8bit are counted, though CUDA may move them to the host"
