"""What a trainer is given to plan a stage, and what it reports."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from proximo.models.precision.placement import Precision
from proximo.models.transformers_model import position_limit
from proximo.plan.cost_model import Batches, Lengths, Model, StepCost
from proximo.plan.rank_memory import ONE_RANK, Layout, OptimizedModules, Ranks, lay_out
from proximo.plan.weightless_models import ModelConfigs


@dataclass(frozen=True, kw_only=True, slots=True)
class StageContext:
    """What a trainer needs to plan a stage."""

    configs: ModelConfigs
    """Looks up model configurations by the paths in the recipe."""
    precision: Precision
    device: str
    ranks: Ranks = ONE_RANK
    updates_only: bool = False
    """Whether phases that train no model are left out."""

    def lay_out(self, models: Mapping[str, Model], role_of: Callable[[str], str]) -> Layout:
        """How the models, which have fake tensors by now, lie on the ranks. Call it before any pass is profiled."""
        return lay_out(models, self.ranks, role_of)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCosts:
    """Models and costs of a stage, as its trainer reports them."""

    models: Mapping[str, Model]
    """Role -> model. Trained models come first."""
    optimized: OptimizedModules
    costs: Mapping[str, StepCost]
    """Phase of a step -> its cost."""
    update: Batches
    """Micro-batches of one update."""
    token_budget: int
    """Maximum number of tokens in a micro-batch."""
    layout: Layout
    notes: tuple[str, ...] = ()
    """Sentences about costs that the plan does not count."""


def truncated_lengths(models: Mapping[str, Model], *, prompt: int, response: int) -> Lengths:
    """Prompt and response lengths, truncated to the shortest context of the models. The prompt is cut first."""
    limits = [position_limit(model.base.config) for model in models.values()]
    limit = min((limit for limit in limits if limit is not None), default=prompt + response)
    response = min(response, limit - 1)
    return Lengths(prompt=min(prompt, limit - response), response=response)
