"""Plans a PPO step: its models, the cost of each of its calls, and the passes that only PPO has.

Every sequence is assumed to have the maximum length.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from proximo.config.ppo.options import PPOConfig
from proximo.config.rewards.sources import ModelRewardConfig
from proximo.config.run import OptimizerConfig, ScalarModelConfig
from proximo.models.heads import full_divergence
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses
from proximo.models.precision.placement import Precision
from proximo.models.pretrained.sources import ModelSource, adapter_or_folder
from proximo.models.scalar import HeadStart, ScalarModel
from proximo.models.sharing import check_scalar_adapter, is_on_trunk, scalar_on, value_on_base
from proximo.plan.cost_model import (
    LOGITS,
    Batches,
    Lengths,
    Model,
    StepCost,
    TrainingPass,
    concurrent_costs,
    inference_cost,
    likelihood_loss,
    reading_cost,
    rollout_cost,
    score_loss,
    sequential_cost,
    training_cost,
)
from proximo.plan.fake_tensor_profiler import PassProfiler, building, to_fake_tensors
from proximo.plan.rank_memory import Layout, OptimizedModules, Ranks
from proximo.plan.stages import StageContext, StageCosts, truncated_lengths
from proximo.plan.weightless_models import (
    ModelConfigs,
    apply_options,
    freeze,
    language_model,
    make_reference,
    scalar_model,
)
from proximo.ppo.recipe import PPORecipe
from proximo.ppo.roles.policy import sampling_options
from proximo.ppo.step import trace_step
from proximo.ppo.update.epochs import num_minibatches
from proximo.run.make.models import lora_options

SAMPLER = "sampler"
"""The copy of the policy that the built-in engine samples ahead with."""


def plan_ppo(recipe: PPORecipe, context: StageContext) -> StageCosts:
    """Models and costs of all calls of a PPO step."""
    ppo = recipe.ppo
    with building():
        models = ppo_models(recipe, context.configs, precision=context.precision)
    to_fake_tensors(*(model.model for model in models.values()))
    prompt, response = recipe.longest
    lengths = truncated_lengths(models, prompt=prompt, response=response)
    texts = None
    if recipe.ptx_data is not None:
        texts = truncated_lengths({"policy": models["policy"]}, prompt=1, response=recipe.ptx_data.max_tokens - 1)
    layout = context.lay_out(
        models, lambda role: role if role in ("policy", "reference", "value", "average") else "reward"
    )
    optimized = ppo_optimized_modules(recipe, models)
    update = _update_batches(ppo, lengths, num_ranks=context.ranks.num)
    return StageCosts(
        models=models,
        optimized=optimized,
        costs=ppo_costs(recipe, models, optimized, lengths, texts, layout=layout, updates_only=context.updates_only),
        update=update,
        token_budget=ppo.tokens_per_microbatch,
        layout=layout,
        notes=tuple(_notes_on(recipe, models["policy"])),
    )


def _notes_on(recipe: PPORecipe, policy: Model) -> Iterator[str]:
    if recipe.ppo.critic_warmup_steps and recipe.value.init_from == "trunk":
        yield "the critic's warm-up is left out: there the value head learns alone, which takes less"
    if any(source.kind == "model" and source.tokenizer is not None for source in recipe.reward):
        yield "a reward model with a tokenizer of its own is taken to read as many tokens as the policy"
    if recipe.environment is not None:
        yield (
            "an episode is taken to be one conversation of environment.max_tokens tokens, nearly all of them decoded: "
            "the time of its environment is not counted, and where a chat template drops earlier text more is read"
        )
    if recipe.ppo.rollout.staleness and recipe.engine.kind == "local":
        yield "generate takes place beside the rest of earlier steps (rollout.staleness): the seconds add up here"
    if recipe.devices.reference.addresses:
        yield "servers give the log-probs of the reference: their time and memory are not counted"
    if recipe.engine.kind == "vllm":
        size = sum(parameter.numel() for parameter in policy.model.parameters())
        dtype = recipe.engine.dtype or ("float32" if policy.precision is Precision.FLOAT32 else "bfloat16")
        width = 4 if dtype == "float32" else 2
        yield (
            "vLLM servers sample the responses: their time and memory are not counted. Each has weights of "
            f"{size * width / 2**30:.2f} GiB and a cache of keys and values; vLLM takes nine tenths of a GPU unless "
            "engine.arguments says otherwise"
        )
        if not policy.has_adapter:
            trained = sum(parameter.numel() for _, parameter in policy.trainable_parameters())
            yield f"where a GPU's memory carries a push, it keeps {trained * width / 2**30:.2f} GiB of the learner's"


def ppo_models(recipe: PPORecipe, configs: ModelConfigs, *, precision: Precision) -> dict[str, Model]:
    """Role -> model without weights, as from_recipe.py builds them. Reward models have their names as roles.

    Call it inside `building()`.
    """
    num_tokens = configs.num_tokens(recipe.tokenizer, recipe.model)
    own = configs.sized(recipe.model, num_tokens)
    policy = language_model(own, recipe.model, precision=precision)
    models: dict[str, Model] = {"policy": policy}
    if recipe.loads_reference:
        models["reference"] = make_reference(recipe.reference, policy, configs, num_tokens)
        if recipe.ppo.kl.reference_every_steps is None:
            models["reference"].narrow_frozen(beside=[policy.model])
    if recipe.ppo.average_decay is not None:
        models["average"] = policy.frozen_copy()
    if recipe.ppo.rollout.staleness and recipe.engine.kind == "local":
        models[SAMPLER] = policy.frozen_copy()
    if recipe.ppo.uses_critic:
        models["value"] = _value_model(recipe, configs, policy)
    for source in recipe.reward:
        if isinstance(source, ModelRewardConfig):
            models[source.name] = freeze(_scorer(source, configs, policy))
            models[source.name].narrow_frozen(beside=[policy.model])
    return models


def _value_model(recipe: PPORecipe, configs: ModelConfigs, policy: LanguageModel) -> ScalarModel:
    """The critic without weights, as from_recipe.py builds it."""
    section, precision = recipe.value, policy.precision
    match section.init_from:
        case "trunk":
            return scalar_on(policy)
        case "policy":
            if section.lora is None or not policy.has_adapter:
                return scalar_model(policy.base.config, section, precision=precision)
            shared = value_on_base(policy, lora_options(section.lora, seed=0), HeadStart.ZERO)
            apply_options(shared, section)
            return shared
        case "reward":
            scorer = next(source for source in recipe.reward if isinstance(source, ModelRewardConfig))
            return _scorer(scorer, configs, policy, section)
        case "path":
            config = configs.sized(section, configs.num_tokens(recipe.tokenizer, recipe.model))
            return scalar_model(config, section, precision=precision)


def _scorer(
    source: ModelRewardConfig, configs: ModelConfigs, policy: LanguageModel, section: ScalarModelConfig | None = None
) -> ScalarModel:
    """The reward model, or with `section` a value model that is initialised from it."""
    section = section or ScalarModelConfig()
    if not source.share_base:
        return scalar_model(configs.config(source.path, source.revision), section, precision=policy.precision)
    if not source.path.startswith("@"):
        folder = adapter_or_folder(source.path, source.revision)
        check_scalar_adapter(ModelSource(path=policy.base.name_or_path), folder, role="reward")
    model = value_on_base(policy, configs.adapter(source.path), HeadStart.ZERO)
    apply_options(model, section)
    return model


def ppo_optimized_modules(recipe: PPORecipe, models: Mapping[str, Model]) -> OptimizedModules:
    """The modules that each optimizer trains, as `make_learners` assigns them (make_roles.py)."""
    config, policy, value = recipe.ppo, models["policy"], models.get("value")
    policy_optimizer = config.policy_optimizer or OptimizerConfig(learning_rate=1e-6)
    if value is None:
        return {"policy": ([policy.model], policy_optimizer)}
    if not _shares_trunk(models):
        return {"policy": ([policy.model], policy_optimizer), "value": ([value.model], config.value_optimizer)}
    head = value.base.get_submodule("score")
    warmup = {"value": ([head], config.value_optimizer)} if config.critic_warmup_steps else {}
    return {"policy": ([policy.model, head], policy_optimizer)} | warmup


def ppo_costs(
    recipe: PPORecipe,
    models: Mapping[str, Model],
    optimized: OptimizedModules,
    lengths: Lengths,
    texts: Lengths | None,
    *,
    layout: Layout,
    updates_only: bool = False,
) -> dict[str, StepCost]:
    """Name of a call -> its cost in one step, in the order of the step. `texts`: lengths of the PTX texts."""
    config = recipe.ppo
    exact = models["policy"].precision is Precision.FLOAT32 and SAMPLER not in models and recipe.engine.kind == "local"
    exact = exact and recipe.environment is None
    serve = exact and not config.rollout.reshapes_distribution
    calls = trace_step(config, reuses_sampled_logprobs=serve, shares_trunk=_shares_trunk(models))
    possible = _inference_calls(recipe, models, lengths, layout.ranks) | _training_calls(
        recipe, models, optimized, lengths, texts, layout=layout
    )
    left_out = set() if recipe.engine.kind == "local" else {"generate", "generate_greedy"}
    left_out |= set() if recipe.loads_reference else {"reference_logprobs"}
    if updates_only:  # and what takes place beside them
        beside = {"generate"} if SAMPLER in models else set()
        left_out |= {name for name in possible.keys() - beside if not name.startswith("train")}
    step_costs = {call.name: possible[call.name]() for call in calls if call.name in possible.keys() - left_out}
    if SAMPLER in models:  # the other calls take place while it samples, and its memory adds to theirs
        sampling = {"generate": step_costs["generate"]}
        step_costs = sampling | {
            name: concurrent_costs({**sampling, name: cost})[name]
            for name, cost in step_costs.items()
            if name != "generate"
        }
    return step_costs


def _update_batches(config: PPOConfig, lengths: Lengths, *, num_ranks: int) -> Batches:
    """Of one update. Responses that are drawn one by one are taken to share no prompt."""
    return Batches.of(
        lengths,
        config.responses_per_update,
        token_budget=config.tokens_per_microbatch,
        responses_per_prompt=config.responses_per_prompt if config.groups_together else 1,
        num_ranks=num_ranks,
    )


def _inference_calls(
    recipe: PPORecipe, models: Mapping[str, Model], lengths: Lengths, ranks: Ranks
) -> dict[str, Callable[[], StepCost]]:
    config, value = recipe.ppo, models.get("value")
    policy, reference = _language_models(models)
    budget, num_ranks = config.tokens_per_microbatch, ranks.num
    step, group = config.responses_per_step, config.responses_per_prompt
    whole = Batches.of(lengths, step, token_budget=budget, responses_per_prompt=group, num_ranks=num_ranks)
    num_sampled = config.prompts_per_step * config.sampled_per_prompt
    group = config.sampled_per_prompt
    scored = [Batches.of(lengths, num_sampled, token_budget=budget, responses_per_prompt=group, num_ranks=num_ranks)]
    options = sampling_options(config)
    rows = {"num_prompts": ranks.share(config.prompts_per_step), "max_num_seqs": config.rollout.max_num_seqs}
    if config.baseline_answer is not None:
        scored.append(Batches.of(lengths, config.prompts_per_step, token_budget=budget, num_ranks=num_ranks))
    full_kl_with = policy if config.kl.full_in == "reward" else None
    reward_models = [models[source.name] for source in recipe.reward if isinstance(source, ModelRewardConfig)]
    calls: dict[str, Callable[[], StepCost]] = {
        "generate": lambda: rollout_cost(policy, lengths, options, num_samples=config.sampled_per_prompt, **rows),
        "generate_greedy": lambda: rollout_cost(policy, lengths, options, num_samples=1, **rows),
        "policy_logprobs": lambda: inference_cost(policy, whole),
        "reference_logprobs": lambda: inference_cost(reference, whole, full_kl_with=full_kl_with),
    }
    if reward_models:
        calls["score"] = lambda: sequential_cost(
            [inference_cost(model, batches) for model in reward_models for batches in scored]
        )
    if isinstance(value, ScalarModel):
        calls["values"] = lambda: inference_cost(value, whole)
        calls["policy_logprobs_and_values"] = lambda: _logprobs_and_values_cost(policy, value, whole)
    return calls


def _training_calls(
    recipe: PPORecipe,
    models: Mapping[str, Model],
    optimized: OptimizedModules,
    lengths: Lengths,
    texts: Lengths | None,
    *,
    layout: Layout,
) -> dict[str, Callable[[], StepCost]]:
    config, value = recipe.ppo, models.get("value")
    policy, reference = _language_models(models)
    budget, ranks = config.tokens_per_microbatch, layout.ranks
    update = _update_batches(config, lengths, num_ranks=ranks.num)
    read = config.epochs_per_step * ranks.share(config.responses_per_step) * lengths.total
    trained = round(read * update.computed_fraction)

    def train(role: str, passes: Sequence[TrainingPass]) -> StepCost:
        modules, optimizer = optimized[role]
        rounds = sum(len(each.batches.groups) for each in passes)
        reduced = layout.reduced(modules, rounds=rounds, in_backward=optimizer.in_backward)
        return training_cost(modules, passes, in_backward=optimizer.in_backward, reduced=reduced)

    def policy_update(on_trunk: ScalarModel | None = None) -> StepCost:
        loss = _policy_loss(policy, reference, config, on_trunk=on_trunk)
        passes = [TrainingPass(loss=loss, batches=update, tokens=trained)]
        if texts is not None and config.ptx is not None:
            ptx = Batches.of(texts, config.ptx.examples_per_update, token_budget=budget, num_ranks=ranks.num)
            updates = config.epochs_per_step * num_minibatches(config.responses_per_step, config.responses_per_update)
            loss = likelihood_loss(policy)
            passes.append(TrainingPass(loss=loss, batches=ptx, tokens=updates * ptx.total_tokens))
        cost = train("policy", passes)
        if config.policy_loss.objective.second_moment_limit is None:
            return cost
        # The minibatch's log-probs are computed once before the update, to choose the tokens that are left out.
        mask_pass = inference_cost(policy, update, tokens=trained)
        return sequential_cost([cost, mask_pass])

    def value_update(value: ScalarModel) -> StepCost:
        return train("value", [TrainingPass(loss=score_loss(value), batches=update, tokens=trained)])

    calls: dict[str, Callable[[], StepCost]] = {"train_policy": policy_update}
    if isinstance(value, ScalarModel):
        calls["train_value"] = lambda: value_update(value)
        calls["train_policy_and_value"] = lambda: policy_update(value)
    return calls


def _language_models(models: Mapping[str, Model]) -> tuple[LanguageModel, LanguageModel]:
    """Policy and reference model. Returns the policy twice if there is no reference."""
    policy = models["policy"]
    reference = models.get("reference", policy)
    assert isinstance(policy, LanguageModel)
    assert isinstance(reference, LanguageModel)
    return policy, reference


def _shares_trunk(models: Mapping[str, Model]) -> bool:
    policy, value = models["policy"], models.get("value")
    return isinstance(policy, LanguageModel) and isinstance(value, ScalarModel) and is_on_trunk(value, policy)


def _policy_loss(
    policy: LanguageModel, reference: LanguageModel | None, config: PPOConfig, *, on_trunk: ScalarModel | None = None
) -> Callable[[PassProfiler, PackedResponses], Tensor]:
    """The part of the policy loss that decides memory, for the profiler: terms of one number per token are left out.

    `on_trunk`: the value model that is trained in the same pass.
    """
    temperature, bonus = config.rollout.temperature, config.policy_loss.entropy_coefficient
    in_loss = config.kl.full_in == "loss"

    def loss(profiler: PassProfiler, batch: PackedResponses) -> Tensor:
        hidden = policy.hidden_states(batch.packed, batch.predictors)
        with profiler.attribute_to(LOGITS):
            tokens = policy.logprobs_from(hidden, batch, temperature=temperature, entropy=bonus > 0)
        total = tokens.logprobs.sum()
        if tokens.entropy is not None:
            total = total + tokens.entropy.sum()
        if in_loss:
            with torch.no_grad():
                other = (reference or policy).hidden_states(batch.packed, batch.predictors)
            with profiler.attribute_to(LOGITS):
                divergence = full_divergence(
                    hidden, policy.head, other, (reference or policy).head, temperature=temperature
                ).kl
            total = total + divergence.sum()
        if on_trunk is not None:
            total = total + on_trunk.scores(hidden).sum()
        return total

    return loss


@torch.no_grad()
def _logprobs_and_values_cost(policy: LanguageModel, value: ScalarModel, batches: Batches) -> StepCost:
    """Cost of computing log-probs and values in one pass through their shared trunk."""
    batch = batches.largest()
    with PassProfiler([policy.model]) as profiler:
        hidden = policy.hidden_states(batch.packed)
        with profiler.attribute_to(LOGITS):
            policy.logprobs_from(hidden[batch.predictors], batch, temperature=1.0)
        value.scores(hidden[batch.value_positions])
    return reading_cost(profiler.cost(), [policy.model, value.model], batches)
