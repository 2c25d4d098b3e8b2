"""`proximo ppo`: from the recipe to a running task. Not the steps (ppo_task.py, ppo.py)."""

from collections.abc import Mapping, Sequence

from torch import nn
from transformers import PreTrainedTokenizerBase

from proximo.config.ppo import ModelRewardConfig
from proximo.config.recipes import PPORecipe
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.models.language import LanguageModel
from proximo.models.positions import check_lengths
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.models.sources import ModelSource
from proximo.models.vocabulary import check_same_vocabulary, load_tokenizer
from proximo.records import Prompt, Response
from proximo.rewards.model import ModelReward
from proximo.rewards.source import RewardSource
from proximo.rewards.weighted import WeightedReward
from proximo.trainers.build import (
    Place,
    build_language_model,
    build_reference,
    build_reward_source,
    build_scalar_model,
    build_tokenizer,
    finish_scalar_model,
    prepare_place,
    refuse_second_adapter,
)
from proximo.trainers.loop import run_task
from proximo.trainers.options import RunOptions
from proximo.trainers.ppo import PPOTrainer
from proximo.trainers.ppo_task import PPOTask
from proximo.trainers.reference_answers import answer_responses
from proximo.trainers.rows import read_split
from proximo.trainers.unchanged import inputs_fingerprint


def run_ppo(recipe: PPORecipe, options: RunOptions) -> int:
    """Train the policy of the recipe; returns the exit status."""
    return run_task(lambda: build_task(recipe), recipe, recipe.run, options)


def build_task(recipe: PPORecipe) -> PPOTask:
    """Data first, then rewards that need no model, then models: a mistake costs as little as it can."""
    place = prepare_place(recipe.run)
    rows = read_split(recipe.data, seed=recipe.run.seed)
    policy_config = recipe.policy
    tokenizer = build_tokenizer(recipe.tokenizer, model_path=policy_config.path, revision=policy_config.revision)
    data = recipe.data
    how = PromptOptions(
        max_tokens=data.max_prompt_tokens,
        too_long=data.too_long,
        as_messages=data.as_messages,
        system=data.system,
        first_words=data.first_words,
    )
    prompts, report = load_prompts(rows.training, tokenizer, how)
    answers = answer_responses(prompts, tokenizer) if recipe.ppo.score.minus_reference_answer else []
    held_out: list[Prompt] = []
    if rows.held_out:
        held_out, _ = load_prompts(rows.held_out, tokenizer, how)
    sources = [
        (config.weight, build_reward_source(config, tokenizer, place=place, tokens_per_microbatch=budget(recipe)))
        for config in (*recipe.reward, *([recipe.gold] if recipe.gold else []))
    ]
    gold = sources.pop()[1] if recipe.gold else None
    reward = WeightedReward(sources)
    # A reward model with a tokenizer of its own counts other tokens, and says of each answer whether it fits.
    judges = {s.name: s.model for _, s in sources if isinstance(s, ModelReward) and s.encoder is None}
    policy = build_language_model(policy_config, tokenizer, place=place, role="policy")
    reference = _build_reference(recipe, tokenizer, place=place)
    value = _build_value(recipe, policy, tokenizer, place=place)
    readers = {**judges, "policy": policy, "reference": reference, "value": value}
    _check_positions(recipe, [*prompts, *held_out], readers)
    _check_answer_positions(answers, judges)
    trainer = PPOTrainer(
        policy,
        tokenizer,
        reference=reference,
        value=value,
        reward=reward,
        config=recipe.ppo,
        seed=recipe.run.seed,
    )
    return PPOTask(
        trainer,
        prompts,
        held_out,
        reward=reward,
        gold=gold,
        samples_per_step=recipe.run.samples_per_step,
        inputs_fingerprint=inputs_fingerprint(rows, tokenizer, _unsaved_models(trainer, sources)),
        notes=(f"data: {rows.description}", f"prompts: {report}"),
    )


def _unsaved_models(trainer: PPOTrainer, sources: Sequence[tuple[float, RewardSource]]) -> dict[str, nn.Module]:
    """What the run reads of other folders at every start: the reference, bases below adapters, reward models."""
    models: dict[str, nn.Module] = {s.name: s.model.model for _, s in sources if isinstance(s, ModelReward)}
    roles = trainer.roles
    if trainer.config.kl.place != "none" or roles.policy.has_adapter:
        models["reference"] = (roles.reference or roles.policy).model
    if roles.value is not None and roles.value.has_adapter:
        models["value_base"] = roles.value.model
    return models


def budget(recipe: PPORecipe) -> int:
    """Tokens of one pass."""
    return recipe.ppo.tokens_per_microbatch


def _check_positions(
    recipe: PPORecipe, prompts: Sequence[Prompt], models: Mapping[str, LanguageModel | ScalarModel | None]
) -> None:
    """Raises ConfigError where a model that reads the policy's ids cannot read the longest prompt with its answer."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    for role, model in models.items():
        if model is not None:
            check_lengths(
                model.base.config,
                role=role,
                max_prompt_tokens=longest,
                max_response_tokens=recipe.ppo.rollout.max_new_tokens,
            )


def _check_answer_positions(answers: Sequence[Response], judges: Mapping[str, ScalarModel]) -> None:
    """Raises ConfigError where a reward model cannot read the longest prompt with its reference answer."""
    lengths = [(len(answer.prompt.token_ids), len(answer.token_ids)) for answer in answers]
    prompt_tokens, answer_tokens = max(lengths, key=sum, default=(0, 0))
    for role, model in judges.items():
        check_lengths(model.base.config, role=role, max_prompt_tokens=prompt_tokens, max_response_tokens=answer_tokens)


def _build_reference(recipe: PPORecipe, tokenizer: PreTrainedTokenizerBase, *, place: Place) -> LanguageModel | None:
    """Another reference than the policy's own start, where the recipe names one."""
    if recipe.reference is None or recipe.ppo.kl.place == "none":
        return None
    return build_reference(recipe.reference, tokenizer, place=place)


def _build_value(
    recipe: PPORecipe, policy: LanguageModel, tokenizer: PreTrainedTokenizerBase, *, place: Place
) -> ScalarModel | None:
    """The critic: from the policy's backbone, the reward model with its head, or a checkpoint of its own."""
    if not recipe.ppo.uses_critic:
        return None
    config = recipe.value
    if config.start == "policy":
        if config.lora is not None:
            refuse_second_adapter(ModelSource(path=recipe.policy.path, config=recipe.policy.config), role="value")
        model = scalar_from_language_model(policy, HeadStart.ZERO, seed=place.seed)
        return finish_scalar_model(model, config, place=place)
    if config.start == "reward":
        scorer = next(source for source in recipe.reward if isinstance(source, ModelRewardConfig))
        path, revision = scorer.path, scorer.revision
        check_same_vocabulary(tokenizer, load_tokenizer(path, revision=revision), role="value")
        start = config.model_copy(update={"start": "path", "path": path, "revision": revision})
        return build_scalar_model(start, tokenizer, fresh_head=None, place=place, role="value")
    if config.path is not None:
        check_same_vocabulary(tokenizer, load_tokenizer(config.path, revision=config.revision), role="value")
    return build_scalar_model(config, tokenizer, fresh_head=HeadStart.ZERO, place=place, role="value")
