"""Whether the optional packages that a recipe needs are installed. Imports none of them, and no torch."""

from importlib.util import find_spec

from proximo.config.base import Section
from proximo.config.recipes import PipelineRecipe, PPORecipe, RewardRecipe, SFTRecipe
from proximo.config.run import RunConfig
from proximo.errors import MissingExtraError

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
"""The module that a kind of sink imports; its extra has the name of the kind."""


def check_extras_of(recipe: Section) -> None:
    """`check_extras` of every stage."""
    match recipe:
        case PipelineRecipe():
            for stage in (recipe.sft, recipe.reward, recipe.ppo):
                if stage is not None:
                    check_extras(stage.run)
        case SFTRecipe() | RewardRecipe() | PPORecipe():
            check_extras(recipe.run)


def check_extras(run: RunConfig) -> None:
    """Raises MissingExtraError that names the extra of a sink whose package is not there."""
    for index, sink in enumerate(run.sinks):
        if sink.kind in PACKAGES and find_spec(PACKAGES[sink.kind]) is None:
            raise MissingExtraError(
                f"run.sinks.{index} is of kind {sink.kind}, whose package is not installed: say "
                f"pip install 'proximo[{sink.kind}]', or leave the sink out"
            )
