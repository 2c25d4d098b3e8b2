"""The models and the passes of a PPO step, as its graph of calls names them. Not the step."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from proximo.config.rewards.sources import ModelRewardConfig
from proximo.config.run import OptimizerConfig, ScalarModelConfig
from proximo.learner.minibatches import num_minibatches
from proximo.models.fake_tensor_profiler import building, rehearsable
from proximo.models.language import LanguageModel
from proximo.models.narrowing import narrow_frozen
from proximo.models.precision.placement import Precision
from proximo.models.pretrained.sources import ModelSource
from proximo.models.scalar import HeadStart, ScalarModel
from proximo.models.sharing.shared_base import check_scalar_adapter, value_on_base
from proximo.models.sharing.trunk import is_on_trunk, scalar_on
from proximo.plan import cost_model
from proximo.plan.cost_model import Batches, Lengths, Lesson, Model, StepCost
from proximo.plan.stages import StageContext, StageCosts, fitting_lengths
from proximo.plan.static_memory import Learning
from proximo.plan.weightless_models import Origins, finish, frozen, language_model, make_reference, scalar_model
from proximo.ppo.graph import step_graph
from proximo.ppo.plan import costs
from proximo.ppo.recipe import PPORecipe
from proximo.ppo.update.overlap import BOTH_UPDATES, trains_side_by_side
from proximo.run.build.models import lora_options


def plan_ppo(recipe: PPORecipe, context: StageContext) -> StageCosts:
    """Every call of a step, by the models that it needs."""
    ppo = recipe.ppo
    with building():
        models = ppo_models(recipe, context.origins, precision=context.precision)
    rehearsable(*(model.model for model in models.values()))
    lengths = fitting_lengths(models, prompt=recipe.data.max_prompt_tokens, response=ppo.rollout.max_new_tokens)
    texts = None
    if recipe.ptx_data is not None:
        texts = fitting_lengths({"policy": models["policy"]}, prompt=1, response=recipe.ptx_data.max_tokens - 1)
    learning = ppo_learning(recipe, models)
    return StageCosts(
        models=models,
        learning=learning,
        costs=ppo_costs(recipe, models, learning, lengths, texts, device=context.device),
        update=Batches.of(lengths, ppo.responses_per_update, token_budget=ppo.tokens_per_microbatch),
        token_budget=ppo.tokens_per_microbatch,
        notes=tuple(_notes_on(recipe)),
    )


def _notes_on(recipe: PPORecipe) -> Iterator[str]:
    if recipe.ppo.critic_warmup_steps and recipe.value.init_from == "trunk":
        yield "the critic's warm-up is left out: there the value head learns alone, which takes less"
    if any(source.kind == "model" and source.tokenizer is not None for source in recipe.reward):
        yield "a reward model with a tokenizer of its own is taken to read as many tokens as the policy"


def ppo_models(recipe: PPORecipe, origins: Origins, *, precision: Precision) -> dict[str, Model]:
    """Role -> model, as from_recipe.py builds them; reward models by their names. To be called inside `building()`."""
    num_tokens = origins.num_tokens(recipe.tokenizer, recipe.policy)
    own = origins.sized(recipe.policy, num_tokens)
    policy = language_model(own, recipe.policy, precision=precision)
    models: dict[str, Model] = {"policy": policy}
    if recipe.ppo.kl.apply_to != "none":
        models["reference"] = make_reference(recipe.reference, policy, origins, num_tokens)
        if recipe.ppo.kl.reference_every_steps is None:
            narrow_frozen(models["reference"], beside=[policy.model])
    if recipe.ppo.average_decay is not None:
        models["average"] = policy.frozen_copy()
    if recipe.ppo.uses_critic:
        models["value"] = _value_model(recipe, origins, policy)
    for source in recipe.reward:
        if isinstance(source, ModelRewardConfig):
            models[source.name] = frozen(_scorer(source, origins, policy))
            narrow_frozen(models[source.name], beside=[policy.model])
    return models


def _value_model(recipe: PPORecipe, origins: Origins, policy: LanguageModel) -> ScalarModel:
    """As critic_initialisation.py makes it."""
    section, precision = recipe.value, policy.precision
    match section.init_from:
        case "trunk":
            return scalar_on(policy)
        case "policy":
            if section.lora is None or not policy.has_adapter:
                return scalar_model(policy.base.config, section, precision=precision)
            shared = value_on_base(policy, lora_options(section.lora, seed=0), HeadStart.ZERO)
            finish(shared, section)
            return shared
        case "reward":
            scorer = next(source for source in recipe.reward if isinstance(source, ModelRewardConfig))
            return _scorer(scorer, origins, policy, section)
        case "path":
            config = origins.sized(section, origins.num_tokens(recipe.tokenizer, recipe.policy))
            return scalar_model(config, section, precision=precision)


def _scorer(
    source: ModelRewardConfig, origins: Origins, policy: LanguageModel, section: ScalarModelConfig | None = None
) -> ScalarModel:
    """The reward model, or the value model of this section that starts from it."""
    section = section or ScalarModelConfig()
    if not source.share_base:
        return scalar_model(origins.config(source.path, source.revision), section, precision=policy.precision)
    if not source.path.startswith("@"):
        check_scalar_adapter(ModelSource(path=policy.base.name_or_path), Path(source.path), role="reward")
    model = value_on_base(policy, origins.adapter(source.path), HeadStart.ZERO)
    finish(model, section)
    return model


def ppo_learning(recipe: PPORecipe, models: Mapping[str, Model]) -> Learning:
    """Which optimizer moves what, as learners.py makes them."""
    config, policy, value = recipe.ppo, models["policy"], models.get("value")
    of_policy = config.policy_optimizer or OptimizerConfig(learning_rate=1e-6)
    if value is None:
        return {"policy": ([policy.model], of_policy)}
    if not _shares_trunk(models):
        return {"policy": ([policy.model], of_policy), "value": ([value.model], config.value_optimizer)}
    head = value.base.get_submodule("score")
    warming = {"value": ([head], config.value_optimizer)} if config.critic_warmup_steps else {}
    return {"policy": ([policy.model, head], of_policy)} | warming


def ppo_costs(
    recipe: PPORecipe,
    models: Mapping[str, Model],
    learning: Learning,
    lengths: Lengths,
    texts: Lengths | None,
    *,
    device: str,
) -> dict[str, StepCost]:
    """What each call of a step costs, by its name, in the order of the graph. `texts`: of `ptx_data`."""
    config = recipe.ppo
    serve = models["policy"].precision is Precision.FLOAT32 and not config.rollout.reshapes_distribution
    calls = step_graph(config, sampled_serve=serve, shares_trunk=_shares_trunk(models)).calls
    possible = _reading_calls(recipe, models, lengths) | _training_calls(recipe, models, learning, lengths, texts)
    found = {call.name: possible[call.name]() for call in calls if call.name in possible}
    together = trains_side_by_side(
        config,
        device=device,
        shares_trunk=_shares_trunk(models),
        compiled=recipe.run.compile != "none",
        num_threads=recipe.run.num_threads,
    )
    return found | (cost_model.at_the_same_time({name: found[name] for name in BOTH_UPDATES}) if together else {})


def _reading_calls(
    recipe: PPORecipe, models: Mapping[str, Model], lengths: Lengths
) -> dict[str, Callable[[], StepCost]]:
    config, value = recipe.ppo, models.get("value")
    policy, reference = _language_models(models)
    budget = config.tokens_per_microbatch
    whole = Batches.of(lengths, config.responses_per_step, token_budget=budget)
    sampled = Batches.of(lengths, config.prompts_per_step * config.sampled_per_prompt, token_budget=budget)
    judged = [sampled]
    one_greedy = config.model_copy(update={"responses_per_prompt": 1, "samples_per_prompt": None})
    if config.baseline_answer is not None:
        judged.append(Batches.of(lengths, config.prompts_per_step, token_budget=budget))
    both = policy if config.kl.estimator == "full" and config.kl.apply_to == "reward" else None
    judges = [models[source.name] for source in recipe.reward if isinstance(source, ModelRewardConfig)]
    calls: dict[str, Callable[[], StepCost]] = {
        "generate": lambda: costs.rollout(policy, lengths, config),
        "generate_greedy": lambda: costs.rollout(policy, lengths, one_greedy),
        "policy_logprobs": lambda: cost_model.reading(policy, whole),
        "reference_logprobs": lambda: cost_model.reading(reference, whole, also=both),
    }
    if judges:
        calls["score"] = lambda: cost_model.one_after_the_other(
            [cost_model.reading(judge, batches) for judge in judges for batches in judged]
        )
    if isinstance(value, ScalarModel):
        calls["values"] = lambda: cost_model.reading(value, whole)
        calls["policy_logprobs_and_values"] = lambda: costs.reading_both(policy, value, whole)
    return calls


def _training_calls(
    recipe: PPORecipe, models: Mapping[str, Model], learning: Learning, lengths: Lengths, texts: Lengths | None
) -> dict[str, Callable[[], StepCost]]:
    config, value = recipe.ppo, models.get("value")
    policy, reference = _language_models(models)
    budget = config.tokens_per_microbatch
    update = Batches.of(lengths, config.responses_per_update, token_budget=budget)
    trained = config.epochs_per_step * config.responses_per_step * lengths.total

    def of_policy(on_trunk: ScalarModel | None = None) -> StepCost:
        loss = costs.policy_loss(policy, reference, config, on_trunk=on_trunk)
        lessons = [Lesson(loss=loss, batches=update, tokens=trained)]
        if texts is not None and config.ptx is not None:
            read = Batches.of(texts, config.ptx.examples_per_update, token_budget=budget)
            updates = config.epochs_per_step * num_minibatches(config.responses_per_step, config.responses_per_update)
            loss = cost_model.likelihood_loss(policy)
            lessons.append(Lesson(loss=loss, batches=read, tokens=updates * read.all_tokens))
        modules, optimizer = learning["policy"]
        cost = cost_model.training(modules, lessons, in_backward=optimizer.in_backward)
        if config.policy_loss.objective != "m2po":
            return cost
        marking = cost_model.reading(policy, update, tokens=trained)
        return cost_model.one_after_the_other([cost, marking])

    def of_value(value: ScalarModel) -> StepCost:
        modules, optimizer = learning["value"]
        lesson = Lesson(loss=cost_model.score_loss(value), batches=update, tokens=trained)
        return cost_model.training(modules, [lesson], in_backward=optimizer.in_backward)

    calls: dict[str, Callable[[], StepCost]] = {"train_policy": of_policy}
    if isinstance(value, ScalarModel):
        calls["train_value"] = lambda: of_value(value)
        calls["train_policy_and_value"] = lambda: of_policy(value)
    return calls


def _language_models(models: Mapping[str, Model]) -> tuple[LanguageModel, LanguageModel]:
    """Policy and reference; the policy itself where there is no reference."""
    policy = models["policy"]
    reference = models.get("reference", policy)
    assert isinstance(policy, LanguageModel)
    assert isinstance(reference, LanguageModel)
    return policy, reference


def _shares_trunk(models: Mapping[str, Model]) -> bool:
    policy, value = models["policy"], models.get("value")
    return isinstance(policy, LanguageModel) and isinstance(value, ScalarModel) and is_on_trunk(value, policy)
