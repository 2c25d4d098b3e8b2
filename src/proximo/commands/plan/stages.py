"""From a recipe to its plans: which models it has, and which passes they make. Not the passes themselves."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from proximo.commands.plan import cost_model
from proximo.commands.plan.cost_model import Batches, Lengths, Lesson, Model, StepCost
from proximo.commands.plan.limits import check_plannable, notes_on
from proximo.commands.plan.ppo_stage import make_reference, ppo_costs, ppo_learning, ppo_models
from proximo.commands.plan.record import Phase, Plan
from proximo.commands.plan.static_memory import Learning, held_bytes, make_roles
from proximo.commands.plan.weightless_models import Origins, language_model, scalar_model
from proximo.config.recipes import DPORecipe, PipelineRecipe, PPORecipe, RewardRecipe, SFTRecipe
from proximo.errors import ModelError, ProximoError
from proximo.models.context_length import position_limit
from proximo.models.fake_tensor_profiler import building, rehearsable, shapes_only
from proximo.models.fast_path import planning_for
from proximo.models.narrowing import narrow_frozen
from proximo.models.precision.placement import Precision, resolve_precision
from proximo.models.pretrained.sources import first_part
from proximo.run.build.models import lora_options

PROCESS = "process"
PROCESS_BYTES = 100 * 2**20
"""On a CPU: what libraries load after their import, data, tokenizer and logs. Measured (benchmarks/plan.py)."""
ALLOCATOR = "allocator"
ALLOCATOR_SHARE = 0.5
"""On a CPU: holes in the heap of glibc, as a share of the activations, gradients and temporaries in it. Measured."""
Stage = SFTRecipe | RewardRecipe | DPORecipe | PPORecipe


def make_plans(recipe: Stage | PipelineRecipe, *, device: str = "cpu") -> list[Plan]:
    """One plan for each stage. `device` is the kind that the recipe's resolves to: cpu, cuda or mps.

    Raises ModelError where a model's configuration cannot be read, or its passes cannot be rehearsed; ConfigError where
    the recipe has an option that no plan can be made for.
    """
    folder = Path(recipe.run.folder) if isinstance(recipe, PipelineRecipe) else None
    origins = Origins(folder=folder)
    stages = [recipe.sft, recipe.reward, recipe.ppo] if isinstance(recipe, PipelineRecipe) else [recipe]
    given = [stage for stage in stages if stage is not None]
    for stage in given:
        check_plannable(stage)
    with shapes_only(), planning_for(device):
        return [_plan(stage, origins, device) for stage in given]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """What a stage has and does."""

    name: str
    models: Mapping[str, Model]
    learning: Learning
    costs: Mapping[str, StepCost]
    update: Batches
    token_budget: int


def _plan(recipe: Stage, origins: Origins, device: str) -> Plan:
    float32_head = recipe.run.head_precision == "float32"
    precision = resolve_precision(recipe.run.precision, device=device, float32_head=float32_head)
    try:
        match recipe:
            case SFTRecipe():
                found = _of_sft(recipe, origins, precision)
            case RewardRecipe():
                found = _of_reward(recipe, origins, precision)
            case DPORecipe():
                found = _of_dpo(recipe, origins, precision)
            case PPORecipe():
                found = _of_ppo(recipe, origins, precision, device)
    except (RuntimeError, NotImplementedError) as error:  # a wrong shape, or a shape that depends on numbers
        if isinstance(error, ProximoError):
            raise
        raise ModelError(f"no plan: a pass of this model cannot be rehearsed: {first_part(error)}") from error
    held = held_bytes(found.models, found.learning)
    return Plan(
        stage=found.name,
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
        notes=tuple(notes_on(recipe)),
    )


def _overhead(cost: StepCost, device: str) -> dict[str, int]:
    """Resident memory of the process beyond its tensors; an accelerator's is that of its tensors alone."""
    return {PROCESS: PROCESS_BYTES, ALLOCATOR: int(ALLOCATOR_SHARE * cost.heap)} if device == "cpu" else {}


def _of_sft(recipe: SFTRecipe, origins: Origins, precision: Precision) -> _Found:
    config = origins.sized(recipe.model, origins.num_tokens(recipe.tokenizer, recipe.model))
    origins.results["@sft"] = config
    with building():
        model = language_model(config, recipe.model, precision=precision, dropout=recipe.sft.dropout)
    rehearsable(model.model)
    lengths = _fitting({"policy": model}, prompt=1, response=recipe.data.max_tokens - 1)
    count, budget = recipe.sft.examples_per_step, recipe.sft.tokens_per_microbatch
    update = Batches.of(lengths, count, token_budget=budget)
    lesson = Lesson(loss=cost_model.likelihood_loss(model), batches=update, tokens=count * lengths.total)
    return _Found(
        name="sft",
        models={"policy": model},
        learning={"policy": ([model.model], recipe.sft.optimizer)},
        costs={"train": cost_model.training([model.model], [lesson], in_backward=recipe.sft.optimizer.in_backward)},
        update=update,
        token_budget=budget,
    )


def _of_reward(recipe: RewardRecipe, origins: Origins, precision: Precision) -> _Found:
    config = origins.sized(recipe.model, origins.num_tokens(recipe.tokenizer, recipe.model))
    origins.results["@reward"] = config
    if recipe.model.lora is not None:
        origins.adapters["@reward"] = lora_options(recipe.model.lora, seed=0)
    with building():
        model = scalar_model(config, recipe.model, precision=precision, dropout=recipe.reward.dropout)
    rehearsable(model.model)
    lengths = _fitting({"reward": model}, prompt=1, response=recipe.data.max_tokens - 1)
    count, budget = recipe.reward.pairs_per_step, recipe.reward.tokens_per_microbatch
    update = Batches.of(lengths, count, token_budget=budget, sequences_each=2)
    lesson = Lesson(loss=cost_model.score_loss(model), batches=update, tokens=2 * count * lengths.total)
    return _Found(
        name="reward",
        models={"reward": model},
        learning={"reward": ([model.model], recipe.reward.optimizer)},
        costs={"train": cost_model.training([model.model], [lesson], in_backward=recipe.reward.optimizer.in_backward)},
        update=update,
        token_budget=budget,
    )


def _of_dpo(recipe: DPORecipe, origins: Origins, precision: Precision) -> _Found:
    """The reference reads all pairs of an update before the policy learns from them."""
    num_tokens = origins.num_tokens(recipe.tokenizer, recipe.model)
    with building():
        policy = language_model(origins.sized(recipe.model, num_tokens), recipe.model, precision=precision)
        models = {"policy": policy, "reference": make_reference(recipe.reference, policy, origins, num_tokens)}
        narrow_frozen(models["reference"], beside=[policy.model])
    rehearsable(*(model.model for model in models.values()))
    lengths = _fitting(models, prompt=1, response=recipe.data.max_tokens - 1)
    count, budget, optimizer = recipe.dpo.pairs_per_step, recipe.dpo.tokens_per_microbatch, recipe.dpo.optimizer
    update = Batches.of(lengths, count, token_budget=budget, sequences_each=2)
    lesson = Lesson(loss=cost_model.likelihood_loss(policy), batches=update, tokens=2 * count * lengths.total)
    return _Found(
        name="dpo",
        models=models,
        learning={"policy": ([policy.model], optimizer)},
        costs={
            "reference_logprobs": cost_model.reading(models["reference"], update),
            "train": cost_model.training([policy.model], [lesson], in_backward=optimizer.in_backward),
        },
        update=update,
        token_budget=budget,
    )


def _of_ppo(recipe: PPORecipe, origins: Origins, precision: Precision, device: str) -> _Found:
    ppo = recipe.ppo
    with building():
        models = ppo_models(recipe, origins, precision=precision)
    rehearsable(*(model.model for model in models.values()))
    lengths = _fitting(models, prompt=recipe.data.max_prompt_tokens, response=ppo.rollout.max_new_tokens)
    texts = None
    if recipe.ptx_data is not None:
        texts = _fitting({"policy": models["policy"]}, prompt=1, response=recipe.ptx_data.max_tokens - 1)
    learning = ppo_learning(recipe, models)
    return _Found(
        name="ppo",
        models=models,
        learning=learning,
        costs=ppo_costs(recipe, models, learning, lengths, texts, device=device),
        update=Batches.of(lengths, ppo.responses_per_update, token_budget=ppo.tokens_per_microbatch),
        token_budget=ppo.tokens_per_microbatch,
    )


def _fitting(models: Mapping[str, Model], *, prompt: int, response: int) -> Lengths:
    """Cut to the positions that every model can read, as the data must be. The prompt gives way first."""
    limits = [position_limit(model.base.config) for model in models.values()]
    limit = min((limit for limit in limits if limit is not None), default=prompt + response)
    response = min(response, limit - 1)
    return Lengths(prompt=min(prompt, limit - response), response=response)
