"""Registers the pipeline as a kind of recipe. Heavy imports are inside the methods."""

from typing import TYPE_CHECKING, Any

from proximo.trainer_kinds import RecipeKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proximo.commands.pipeline.recipe import PipelineRecipe


class PipelineKind(RecipeKind):
    name = "pipeline"
    help = """Run fine-tuning, reward model and PPO, each from the results of the stages before it.

    Stages write to FOLDER/sft, FOLDER/reward, FOLDER/prm and FOLDER/ppo. --resume skips finished stages.

    \b
    proximo pipeline demo                     the shipped example, a few minutes on a CPU
    proximo pipeline my.yaml --dry-run
    proximo pipeline my.yaml ppo.ppo.num_steps=50 --resume=auto
    """

    @property
    def schema(self) -> "type[PipelineRecipe]":
        from proximo.commands.pipeline.recipe import PipelineRecipe

        return PipelineRecipe

    def recognises(self, tree: "Mapping[str, Any]") -> bool:
        last = tree.get("ppo")
        return isinstance(last, dict) and not last.keys().isdisjoint(("model", "data", "reward"))


PIPELINE = PipelineKind()
