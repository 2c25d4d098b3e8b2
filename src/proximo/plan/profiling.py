"""Makes the plans of a recipe, one per stage. Each trainer supplies the models and passes of its stage."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from proximo.config.recipe import Recipe, TrainerRecipe
from proximo.errors import ConfigError, ModelError, ProximoError
from proximo.models.fast_path import planning_for
from proximo.models.precision.placement import Precision, resolve_precision
from proximo.models.pretrained.sources import first_part
from proximo.plan.cost_model import Model, StepCost
from proximo.plan.fake_tensor_profiler import shapes_only
from proximo.plan.rank_memory import ONE_RANK, Ranks, host_bytes, rank_memory, role_sizes
from proximo.plan.record import Phase, Plan
from proximo.plan.stages import StageContext, StageCosts
from proximo.plan.weightless_models import ModelConfigs
from proximo.run.make.models import lora_options
from proximo.trainer_kinds import trainer_of

PROCESS = "process"
PROCESS_BYTES = 100 * 2**20
"""Bytes on a CPU for data, tokenizer, logs and libraries that are loaded late. Measured by benchmarks/plan.py."""
ALLOCATOR = "allocator"
ALLOCATOR_SHARE = 0.5
"""Fragmentation of the glibc heap on a CPU, as a share of activations, gradients and temporaries in it. Measured."""


def make_plans(recipe: Recipe, *, device: str = "cpu", num_ranks: int = 1, updates_only: bool = False) -> list[Plan]:
    """One plan for each stage. `device` is the device type that the recipe resolves to: cpu, cuda or mps.

    With several ranks the plan is that of one of them. `updates_only`: leave out the phases that train no model. Raises
    ModelError if a model's configuration cannot be read or its passes cannot be profiled, and ConfigError if the recipe
    has an option that cannot be planned.
    """
    stages = dict(recipe.given_stages())
    for stage in stages.values():
        _check_plannable(stage)
    configs = ModelConfigs(folder=None if "" in recipe.stages() else Path(recipe.run.folder))
    plans = []
    with shapes_only(), planning_for(device):
        for prefix, stage in stages.items():
            ranks = Ranks(num=num_ranks, devices=stage.devices) if num_ranks > 1 else ONE_RANK
            precision = resolve_precision(
                stage.run.precision, device=device, float32_head=stage.run.head_precision == "float32"
            )
            context = StageContext(
                configs=configs, precision=precision, device=device, ranks=ranks, updates_only=updates_only
            )
            costs = _costs(stage, context)
            plans.append(_plan(stage, costs, precision, device))
            _keep_result(stage, costs.models, configs, f"@{prefix.removesuffix('.')}")
    return plans


def _keep_result(recipe: TrainerRecipe, models: Mapping[str, Model], configs: ModelConfigs, name: str) -> None:
    """Record the configuration of the stage's result for later stages that load it."""
    section, model = next(iter(recipe.models().values())), next(iter(models.values()))
    configs.results[name] = model.base.config
    if section.lora is not None:
        configs.adapters[name] = lora_options(section.lora, seed=0)


def _costs(recipe: TrainerRecipe, context: StageContext) -> StageCosts:
    try:
        return trainer_of(recipe).plan(recipe, context)
    except (RuntimeError, NotImplementedError) as error:  # a wrong shape, or a data-dependent one
        if isinstance(error, ProximoError):
            raise
        raise ModelError(
            f"no plan: a pass of this model cannot be profiled without weights: {first_part(error)}"
        ) from error


def _plan(recipe: TrainerRecipe, stage: StageCosts, precision: Precision, device: str) -> Plan:
    layout = stage.layout

    def parts(cost: StepCost) -> dict[str, int]:
        return rank_memory(layout, stage.optimized, cost, has_own_memory=device == "cuda")

    return Plan(
        stage=trainer_of(recipe).name,
        trained=tuple(key for key in recipe.models() if key != "reference"),
        device=device,
        precision="bf16" if precision.is_half else precision.value,
        roles=role_sizes(stage.models),
        phases=tuple(
            Phase(
                name=name,
                parts_bytes={**parts(cost), **_overhead(cost, device)},
                tokens_per_step=cost.tokens,
                flops_per_step=cost.flops,
            )
            for name, cost in stage.costs.items()
        ),
        sequence_tokens=stage.update.lengths,
        microbatch_tokens=stage.update.max_tokens,
        token_budget=stage.token_budget,
        notes=(*_notes_on(recipe), *_note_on_experts(stage), *stage.notes),
        num_ranks=layout.ranks.num,
        host_bytes=host_bytes(layout, stage.optimized),
    )


def _overhead(cost: StepCost, device: str) -> dict[str, int]:
    """Resident memory beyond the tensors, on a CPU only: on an accelerator only tensors are counted."""
    return {PROCESS: PROCESS_BYTES, ALLOCATOR: int(ALLOCATOR_SHARE * cost.heap)} if device == "cpu" else {}


def _check_plannable(recipe: TrainerRecipe) -> None:
    """Raises ConfigError if a model has quantised weights."""
    for key, model in recipe.models().items():
        if model.quantisation != "none":
            raise ConfigError(
                f"no plan for {key}.quantisation {model.quantisation}: what bitsandbytes holds and expands in its "
                f"products cannot be profiled without weights; plan with {key}.quantisation=none for what the same "
                "run takes with float32 weights"
            )


def _note_on_experts(stage: StageCosts) -> Iterator[str]:
    balanced = [role for role in stage.optimized if role in stage.models and stage.models[role].backbone.balancing]
    if balanced:
        yield (
            f"what balances the experts ({', '.join(balanced)}) is left out: one more pass without gradients for an "
            "update of several micro-batches, and 4 bytes for each token, expert and layer"
        )


def _notes_on(recipe: TrainerRecipe) -> Iterator[str]:
    """One sentence for each option of the recipe that the plan does not count."""
    if recipe.run.compile != "none":
        yield f"run.compile {recipe.run.compile} is left out: passes are counted as they are without it"
    if any(optimizer.kind == "adamw_paged_8bit" for optimizer in recipe.optimizers().values()):
        yield "the moments of adamw_paged_8bit are counted, though CUDA may move them to the host"
