"""Makes the plans of a recipe, one per stage. Each trainer supplies the models and passes of its stage."""

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
from proximo.plan.static_memory import OptimizedModules, role_sizes, static_bytes
from proximo.plan.weightless_models import ModelConfigs
from proximo.run.build.models import lora_options
from proximo.trainer_kinds import trainer_of

PROCESS = "process"
PROCESS_BYTES = 100 * 2**20
"""Bytes on a CPU for data, tokenizer, logs and libraries that are loaded late. Measured by benchmarks/plan.py."""
ALLOCATOR = "allocator"
ALLOCATOR_SHARE = 0.5
"""Fragmentation of the glibc heap on a CPU, as a share of activations, gradients and temporaries in it. Measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageContext:
    """What a trainer needs to plan a stage."""

    configs: ModelConfigs
    """Looks up model configurations by the paths in the recipe."""
    precision: Precision
    device: str


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
    notes: tuple[str, ...] = ()
    """Sentences about costs that the plan does not count."""


def make_plans(recipe: Recipe, *, device: str = "cpu") -> list[Plan]:
    """One plan for each stage. `device` is the device type that the recipe resolves to: cpu, cuda or mps.

    Raises ModelError if a model's configuration cannot be read or its passes cannot be profiled, and ConfigError if the
    recipe has an option that cannot be planned.
    """
    stages = dict(recipe.given_stages())
    for stage in stages.values():
        check_plannable(stage)
    configs = ModelConfigs(folder=None if "" in recipe.stages() else Path(recipe.run.folder))
    plans = []
    with shapes_only(), planning_for(device):
        for prefix, stage in stages.items():
            plan, models = _plan(stage, configs, device)
            plans.append(plan)
            _keep_result(stage, models, configs, f"@{prefix.removesuffix('.')}")
    return plans


def _keep_result(recipe: TrainerRecipe, models: Mapping[str, Model], configs: ModelConfigs, name: str) -> None:
    """Record the configuration of the stage's result for later stages that load it."""
    section, model = next(iter(recipe.models().values())), next(iter(models.values()))
    configs.results[name] = model.base.config
    if section.lora is not None:
        configs.adapters[name] = lora_options(section.lora, seed=0)


def _plan(recipe: TrainerRecipe, configs: ModelConfigs, device: str) -> tuple[Plan, Mapping[str, Model]]:
    float32_head = recipe.run.head_precision == "float32"
    precision = resolve_precision(recipe.run.precision, device=device, float32_head=float32_head)
    trainer = trainer_of(recipe)
    try:
        stage = trainer.plan(recipe, StageContext(configs=configs, precision=precision, device=device))
    except (RuntimeError, NotImplementedError) as error:  # a wrong shape, or a data-dependent one
        if isinstance(error, ProximoError):
            raise
        raise ModelError(
            f"no plan: a pass of this model cannot be profiled without weights: {first_part(error)}"
        ) from error
    static = static_bytes(stage.models, stage.optimized)
    plan = Plan(
        stage=trainer.name,
        trained=tuple(key for key in recipe.models() if key != "reference"),
        device=device,
        precision="bf16" if precision.is_half else precision.value,
        roles=role_sizes(stage.models),
        phases=tuple(
            Phase(
                name=name,
                parts={**static, **cost.parts, **_overhead(cost, device)},
                tokens=cost.tokens,
                flops=cost.flops,
            )
            for name, cost in stage.costs.items()
        ),
        sequence=stage.update.lengths,
        microbatch_tokens=stage.update.max_tokens,
        token_budget=stage.token_budget,
        notes=(*notes_on(recipe), *stage.notes),
    )
    return plan, stage.models


def _overhead(cost: StepCost, device: str) -> dict[str, int]:
    """Resident memory beyond the tensors, on a CPU only: on an accelerator only tensors are counted."""
    return {PROCESS: PROCESS_BYTES, ALLOCATOR: int(ALLOCATOR_SHARE * cost.heap)} if device == "cpu" else {}


def truncated_lengths(models: Mapping[str, Model], *, prompt: int, response: int) -> Lengths:
    """Prompt and response lengths, truncated to the shortest context of the models. The prompt is cut first."""
    limits = [position_limit(model.base.config) for model in models.values()]
    limit = min((limit for limit in limits if limit is not None), default=prompt + response)
    response = min(response, limit - 1)
    return Lengths(prompt=min(prompt, limit - response), response=response)
