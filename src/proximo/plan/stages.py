"""From a recipe to its plans: what any stage needs, around the models and passes that its trainer says it has."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from proximo.config.recipe import Recipe, TrainerRecipe
from proximo.errors import ModelError, ProximoError
from proximo.models.context_length import position_limit
from proximo.models.fake_tensor_profiler import shapes_only
from proximo.models.fast_path import planning_for
from proximo.models.precision.placement import Precision, resolve_precision
from proximo.models.pretrained.sources import first_part
from proximo.plan.cost_model import Batches, Lengths, Model, StepCost
from proximo.plan.limits import check_plannable, notes_on
from proximo.plan.record import Phase, Plan
from proximo.plan.static_memory import Learning, held_bytes, make_roles
from proximo.plan.weightless_models import Origins
from proximo.run.build.models import lora_options
from proximo.trainer_kinds import trainer_of

PROCESS = "process"
PROCESS_BYTES = 100 * 2**20
"""On a CPU: what libraries load after their import, data, tokenizer and logs. Measured (benchmarks/plan.py)."""
ALLOCATOR = "allocator"
ALLOCATOR_SHARE = 0.5
"""On a CPU: holes in the heap of glibc, as a share of the activations, gradients and temporaries in it. Measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageContext:
    """What a trainer is told to plan with."""

    origins: Origins
    """Configurations of models by what the recipe calls them."""
    precision: Precision
    device: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCosts:
    """What a stage has and does, as its trainer says."""

    models: Mapping[str, Model]
    """By role; what is trained comes first."""
    learning: Learning
    costs: Mapping[str, StepCost]
    """By phase of a step."""
    update: Batches
    """The sequences of one update."""
    token_budget: int
    """Of a micro-batch."""
    notes: tuple[str, ...] = ()
    """What the run does that is not in these numbers."""


def make_plans(recipe: Recipe, *, device: str = "cpu") -> list[Plan]:
    """One plan for each stage. `device` is the kind that the recipe's resolves to: cpu, cuda or mps.

    Raises ModelError where a model's configuration cannot be read, or its passes cannot be rehearsed; ConfigError where
    the recipe has an option that no plan can be made for.
    """
    stages = dict(recipe.given_stages())
    for stage in stages.values():
        check_plannable(stage)
    origins = Origins(folder=None if "" in recipe.stages() else Path(recipe.run.folder))
    plans = []
    with shapes_only(), planning_for(device):
        for prefix, stage in stages.items():
            plan, models = _plan(stage, origins, device)
            plans.append(plan)
            _keep_result(stage, models, origins, f"@{prefix.removesuffix('.')}")
    return plans


def _keep_result(recipe: TrainerRecipe, models: Mapping[str, Model], origins: Origins, name: str) -> None:
    """What the stage makes, for later stages that start from it."""
    section, model = next(iter(recipe.models().values())), next(iter(models.values()))
    origins.results[name] = model.base.config
    if section.lora is not None:
        origins.adapters[name] = lora_options(section.lora, seed=0)


def _plan(recipe: TrainerRecipe, origins: Origins, device: str) -> tuple[Plan, Mapping[str, Model]]:
    float32_head = recipe.run.head_precision == "float32"
    precision = resolve_precision(recipe.run.precision, device=device, float32_head=float32_head)
    trainer = trainer_of(recipe)
    try:
        found = trainer.plan(recipe, StageContext(origins=origins, precision=precision, device=device))
    except (RuntimeError, NotImplementedError) as error:  # a wrong shape, or a shape that depends on numbers
        if isinstance(error, ProximoError):
            raise
        raise ModelError(f"no plan: a pass of this model cannot be rehearsed: {first_part(error)}") from error
    held = held_bytes(found.models, found.learning)
    plan = Plan(
        stage=trainer.name,
        trained=tuple(key for key in recipe.models() if key != "reference"),
        device=device,
        precision="bf16" if precision.is_half else precision.value,
        roles=make_roles(found.models),
        phases=tuple(
            Phase(
                name=name, parts={**held, **cost.parts, **_overhead(cost, device)}, tokens=cost.tokens, flops=cost.flops
            )
            for name, cost in found.costs.items()
        ),
        sequence=found.update.lengths,
        microbatch_tokens=found.update.tokens,
        token_budget=found.token_budget,
        notes=(*notes_on(recipe), *found.notes),
    )
    return plan, found.models


def _overhead(cost: StepCost, device: str) -> dict[str, int]:
    """Resident memory of the process beyond its tensors; an accelerator's is that of its tensors alone."""
    return {PROCESS: PROCESS_BYTES, ALLOCATOR: int(ALLOCATOR_SHARE * cost.heap)} if device == "cpu" else {}


def fitting_lengths(models: Mapping[str, Model], *, prompt: int, response: int) -> Lengths:
    """Cut to the positions that every model can read, as the data must be. The prompt gives way first."""
    limits = [position_limit(model.base.config) for model in models.values()]
    limit = min((limit for limit in limits if limit is not None), default=prompt + response)
    response = min(response, limit - 1)
    return Lengths(prompt=min(prompt, limit - response), response=response)
