"""What `--dry-run` says of a PPO recipe: roles, reward sources, the size of a step, and keys without effect.

Imports no torch. Keys of shared sections: config/ineffective_keys.py.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any

from proximo.config.environment import ROWS, EnvironmentConfig, ToolsEnvironmentConfig, VerifiersEnvironmentConfig
from proximo.config.ineffective_keys import given_keys, nothing_evaluated
from proximo.config.ppo.options import PPOConfig
from proximo.config.rewards.sources import FunctionRewardConfig
from proximo.config.rewards.verifiers import CountdownRewardConfig, MathsRewardConfig
from proximo.data.formats.prompt_response import Exchange
from proximo.data.formats.row_formats import prompt_exchanges, prompt_metadata, text_exchanges
from proximo.data.formats.typed_columns import answer_cell
from proximo.data.load_report import Remark
from proximo.data.rows import Row
from proximo.environments.adapters.tools import check_reward, column_problem, gives_reward, tool_methods
from proximo.environments.players.player import environment_maker, imported
from proximo.errors import ConfigError, DataError, as_own_errors
from proximo.message_text import count_of
from proximo.ppo.recipe import PPORecipe
from proximo.rewards.function_binding import BoundFunction, bound_import
from proximo.run.dry_run import Line, data_lines, describe_model, describe_reference, text_config, trained_part
from proximo.run.preflight import environment_inputs, reward_inputs
from proximo.user_code import kept_working_directory
from proximo_verifiers import errors as verifiers


def dry_run(recipe: PPORecipe) -> Iterator[Line]:
    """One line for each thing that would be loaded, created or counted."""
    functions = _bound_functions(recipe)
    tools = environment_code(recipe)
    yield from _roles(recipe, tools)
    reader = partial(_read_rows, recipe=recipe, functions=functions)
    if recipe.environment is not None:
        reader = partial(_read_episodes, environment=recipe.environment, functions=functions, tools=tools)
    num_rows = yield from data_lines(recipe, recipe.data, reader)
    if recipe.ptx_data is not None and recipe.ppo.ptx is not None:
        learns_all = recipe.ptx_data.train_on == "everything"
        reader = partial(text_exchanges, form=recipe.ptx_data.form, learns_all=learns_all)
        for name, text in data_lines(recipe, recipe.ptx_data, reader):
            yield "ptx" if name == "data" else name, text
        yield "", f"{count_of(recipe.ppo.ptx.examples_per_update, 'text')} in each update"
    yield from _steps(recipe)
    if num_rows:
        passes = recipe.ppo.num_steps * recipe.ppo.prompts_per_step / num_rows
        drawn = f"{count_of(recipe.ppo.num_steps, 'step')} x {count_of(recipe.ppo.prompts_per_step, 'prompt')}"
        least = "at least " if recipe.ppo.resamples else ""
        yield "", f"{drawn} on {count_of(num_rows, 'row')}: {least}{passes:,.{0 if passes >= 10 else 1}f} passes"


def _bound_functions(recipe: PPORecipe) -> list[BoundFunction]:
    """The reward functions, imported and bound. Raises ConfigError for one that the run would refuse."""
    sources = [*recipe.reward, *([recipe.gold] if recipe.gold else [])]
    bound = [
        bound_import(source.function, source.kwargs, name=repr(source.name))
        for source in sources
        if isinstance(source, FunctionRewardConfig)
    ]
    return [each for each in bound if each is not None]


def environment_code(recipe: PPORecipe) -> Any:
    """Import the code of an environment: the class of kind `tools`; None for other kinds.

    Raises ConfigError for one without tools, without a reward, or with a `reset` that a run without data cannot call.
    """
    environment = recipe.environment
    if environment is None or isinstance(environment, VerifiersEnvironmentConfig):  # which has a Python of its own
        return None
    with kept_working_directory():
        if not isinstance(environment, ToolsEnvironmentConfig):
            environment_maker(*environment.made_by(""))
            return None
        tools = imported(environment.path)
    tool_methods(tools)
    if not recipe.reward:
        check_reward(tools, environment.path)
    if _is_numbered(recipe) and (problem := column_problem(tools, environment.path, ["episode"])):
        raise ConfigError(f"data has no sources: {problem}")
    return tools


def _is_numbered(recipe: PPORecipe) -> bool:
    """Whether the rows are the numbers of episodes, for want of data."""
    return any(source.function == ROWS for source in recipe.data.sources)


def _read_episodes(
    rows: Iterable[Row],
    remarks: Counter[Remark],
    *,
    environment: EnvironmentConfig,
    functions: Sequence[BoundFunction],
    tools: Any,
) -> Iterator[Exchange]:
    """Looks at rows that begin episodes. Raises DataError for one that `reset` or a reward function cannot be given."""
    del remarks
    for row in rows:
        is_tools = isinstance(environment, ToolsEnvironmentConfig)
        if is_tools and (problem := column_problem(tools, environment.path, row.values)):
            raise DataError(f"{row.origin}: {problem}")
        _check_columns(row, list(row.values), functions)
    yield from ()


def _check_columns(row: Row, columns: Collection[str], functions: Sequence[BoundFunction]) -> None:
    for function in functions:
        if problem := function.wanted.problem(columns):
            raise DataError(f"{row.origin}: reward function {function.name} {problem}")


def _read_rows(
    rows: Iterable[Row], remarks: Counter[Remark], *, recipe: PPORecipe, functions: Sequence[BoundFunction]
) -> Iterator[Exchange]:
    """Reads rows as the run does. Raises DataError for one that a reward function cannot be given."""
    rows = list(rows)
    for source in (*recipe.reward, recipe.gold):
        if isinstance(source, MathsRewardConfig | CountdownRewardConfig):
            _check_answers(source, rows)
    for row in rows:
        answered = [] if row.values.get("answer") is None else ["answer"]
        _check_columns(row, [*prompt_metadata(row), *answered], functions)
    return prompt_exchanges(rows, remarks, recipe.data.first_words)


def _check_answers(source: MathsRewardConfig | CountdownRewardConfig, rows: Sequence[Row]) -> None:
    """Raises DataError for a row that the verifier could not grade. Others run programs, or are the user's."""
    with as_own_errors():
        verifier = resolve_name(source.verifier_path())(**source.verifier_options())
    for row in rows:
        try:
            verifier.check_row(reference=answer_cell(row, "answer"), metadata=prompt_metadata(row))
        except verifiers.DataError as error:
            raise DataError(f"{row.origin}: reward source {source.name!r}: {error}") from None


def _roles(recipe: PPORecipe, tools: Any) -> Iterator[Line]:
    yield "policy", f"{describe_model(recipe.model)}, {trained_part(recipe.model)}"
    reference = None
    if recipe.ppo.kl.needs_reference:
        _check_rows(recipe)
        reference = describe_reference(recipe.model, recipe.reference)
    if reference and (addresses := recipe.devices.reference.addresses):
        reference += f", not loaded: vLLM at {', '.join(addresses)}"
    yield "reference", reference or "none: ppo.kl is none"
    yield "value", _value(recipe)
    if recipe.engine.kind == "vllm":
        addresses = ", ".join(recipe.engine.addresses)
        yield "engine", f"vLLM at {addresses}" if addresses else f"vLLM, {recipe.engine.replicas} started by the run"
    if staleness := recipe.ppo.rollout.staleness:
        yield "rollout", f"sampled while the learner trains, at most {count_of(staleness, 'step')} ahead"
    if recipe.environment is not None:
        yield from _environment(recipe, recipe.environment, tools)
    if not recipe.is_rewarded:
        yield "reward", f"none: learns from the reference alone, with the KL in the {recipe.ppo.kl.kind}"
    for index, source in enumerate(recipe.reward):
        first, *_ = reward_inputs(source, f"reward.{index}")
        added = "" if recipe.environment is None else ", of the episode"
        yield "reward", f"{source.name}: {first}, weight {source.weight:g}{added}"
    if recipe.gold is not None:
        first, *_ = reward_inputs(recipe.gold, "gold")
        yield "gold", f"{recipe.gold.name}: {first}, watched only"


def _check_rows(recipe: PPORecipe) -> None:
    """Raises ModelError where the configurations of policy and reference show that the run refuses them."""
    sections = (recipe.model, recipe.reference) if recipe.reference is not None else ()
    rows = [size for each in sections if isinstance(size := text_config(each).get("vocab_size"), int)]
    if len(set(rows)) == 2 and not recipe.tokenizer.added_tokens:  # which add rows to both
        from proximo.models.heads import check_same_rows  # imports torch

        check_same_rows(*rows)


def _environment(recipe: PPORecipe, environment: EnvironmentConfig, tools: Any) -> Iterator[Line]:
    """Its code, where its episodes come from, and what rewards them."""
    named = next((each.name for each in environment_inputs(environment, "environment")), environment.kind)
    yield "environment", f"{named}, {environment.workers} at once, at most {count_of(environment.max_turns, 'turn')}"
    numbers = f"{count_of(environment.num_rows, 'episode')}, whose rows are their numbers: data has no sources"
    yield "", numbers if _is_numbered(recipe) else "each row of the data below begins an episode"
    is_silent = isinstance(environment, ToolsEnvironmentConfig) and not gives_reward(tools)
    yield "reward", f"environment: {'nothing, since its class has no get_reward()' if is_silent else 'what it gives'}"


def _value(recipe: PPORecipe) -> str:
    if not recipe.ppo.uses_critic:
        return f"none: advantage {recipe.ppo.advantage.kind} has no critic"
    origins = {
        "policy": "backbone of the policy, fresh head",
        "reward": "backbone and head of the reward model",
        "trunk": "a head on the policy's own backbone",
    }
    return origins.get(recipe.value.init_from) or f"{describe_model(recipe.value)}, {trained_part(recipe.value)}"


def _steps(recipe: PPORecipe) -> Iterator[Line]:
    ppo, (prompt, response) = recipe.ppo, recipe.longest
    responses, of_update = ppo.responses_per_step, ppo.responses_per_update
    minibatches = -(-responses // of_update)
    updates = ppo.epochs_per_step * minibatches
    tokens = responses * (prompt + response)
    each = f"({prompt:,} + {response:,})" if recipe.environment is None else f"{prompt + response:,}"
    rest = responses % of_update
    uneven = f", the last of {rest}" if rest else ""
    prompts, scored = count_of(ppo.prompts_per_step, "prompt"), count_of(responses, "response")
    yield "one step", f"{prompts} x {ppo.responses_per_prompt:,} = {scored}"
    if ppo.samples_per_prompt is not None:
        sampled = ppo.prompts_per_step * ppo.samples_per_prompt
        kept = "best and worst" if ppo.policy_loss.objective.is_pairwise else "best"
        yield "", f"the {kept} of {sampled:,} that are sampled and scored, {ppo.samples_per_prompt} to each prompt"
    cut = f"{count_of(minibatches, 'minibatch', 'minibatches')} of {of_update:,}{uneven}"
    yield "", f"{count_of(ppo.epochs_per_step, 'epoch')} x {cut} = {count_of(updates, 'update')}"
    yield "", f"at most {responses:,} x {each} = {tokens:,} tokens"
    if ppo.critic_warmup_steps:
        yield "", f"in the first {count_of(ppo.critic_warmup_steps, 'step')} the value model learns alone"
    yield (
        "whole run",
        f"{count_of(ppo.num_steps, 'step')}: {count_of(ppo.num_steps * responses, 'response')}, "
        f"{count_of(ppo.num_steps * updates, 'update')}, at most {count_of(ppo.num_steps * tokens, 'token')}",
    )


def ineffective_keys(recipe: PPORecipe, prefix: str) -> Iterator[str]:
    """One sentence for each key that has no effect because of another one, with its full path and the reason."""
    for holds, path, keys, reason in _without_effect(recipe, prefix):
        if holds:
            section = attrgetter(path)(recipe) if path else recipe
            yield from given_keys(section, keys, f"{prefix}{path}." if path else prefix, reason)
    for index, source in enumerate(recipe.reward):
        if source.weight == 0:
            yield (
                f"{prefix}reward.{index}.weight is 0: the source is asked and shown, and nothing is learned from it; "
                "gold is for a score that is only watched"
            )


_Row = tuple[object, str, tuple[str, ...], str]
"""Whether it holds, the section of the keys in the recipe, the keys that then have no effect, and the reason."""


def _without_effect(recipe: PPORecipe, prefix: str) -> Iterator[_Row]:
    """All that may leave keys without effect."""
    ppo = recipe.ppo
    yield from _without_effect_on_scores(ppo)
    score, advantage, objective, guards = ppo.score, ppo.advantage, ppo.policy_loss.objective, ppo.guards
    unread = nothing_evaluated(recipe.data, f"{prefix}data") or ""
    evaluation = ("evaluate_greedy", "evaluation_samples_per_prompt", "evaluate_reference", "evaluate_average")
    yield unread, "ppo", evaluation, unread
    reason = f"minibatch_responses is {ppo.minibatch_responses}"
    yield ppo.minibatch_responses is not None, "ppo", ("num_minibatches",), reason
    no_critic = f"advantage {advantage.kind} has no critic"
    yield not ppo.uses_critic, "ppo", ("value_loss", "value_optimizer"), no_critic
    yield not ppo.uses_critic, "", ("value",), no_critic
    adaptive = advantage.model_dump().get("length_adaptive") is not None
    yield adaptive, "ppo.advantage", ("gae_lambda",), "length_adaptive sets the decay of each response"
    once = advantage.most_rollouts == 1
    yield once, "ppo.advantage", ("resample_rounds",), "zero_variance_groups is not resample"
    raw = not advantage.standardise and score.whiten_rewards == "none"
    yield raw, "ppo.advantage", ("unbiased_variance",), "nothing is standardised"
    yield objective.is_pairwise, "ppo", ("keep_groups_together",), "pairs are always kept together"
    reason = f"objective {objective.kind} is the mean over pairs"
    yield objective.is_pairwise, "ppo.policy_loss", ("aggregation",), reason
    stays = ppo.kl.reference_every_steps is None
    yield stays, "ppo.kl", ("reference_decay",), "without reference_every_steps it stays"
    earlier = guards.max_kl is not None and guards.target_kl is not None and guards.target_kl <= guards.max_kl
    yield earlier, "ppo.guards", ("max_kl",), "target_kl ends the step before"
    yield ppo.rollout.greedy, "ppo", ("evaluate_greedy",), "rollout.greedy holds for evaluations too"
    yield not ppo.kl.needs_reference, "", ("reference",), "ppo.kl is none"
    if recipe.reference is not None:
        loaded = tuple(name for name in type(recipe.reference).model_fields if name not in ("path", "revision"))
        yield recipe.devices.reference.addresses, "reference", loaded, "its servers load the model"
    reason = "with run.precision float32 and the built-in engine, sampled log-probs are the learner's own"
    yield recipe.sampler_is_exact, "ppo.guards", ("max_mismatch",), reason
    if recipe.environment is not None:
        texts = ("max_prompt_tokens", "too_long", "as_messages", "system", "first_words", "fill_to_max")
        yield True, "data", texts, "an environment writes its own observations"
        yield not _is_numbered(recipe), "environment", ("num_rows",), "data has rows of its own"
    nothing_rewarded = not recipe.is_rewarded and ppo.kl.in_loss
    reason = "without a reward, and with kl.kind: loss, all advantages are 0"
    yield nothing_rewarded, "ppo.policy_loss", ("objective", "behaviour_weight"), reason
    yield nothing_rewarded, "ppo.advantage", ("gamma", "standardise"), reason


def _without_effect_on_scores(ppo: PPOConfig) -> Iterator[_Row]:
    score = ppo.score
    reason = f"normalise: {score.normalise} divides by the deviation of the scores, whatever their scale"
    yield score.normalise != "none", "ppo.score", ("scale",), reason
    reason = "normalise: standardise subtracts the mean of the scores"
    yield score.normalise == "standardise", "ppo.score", ("bias",), reason
    no_buffer = score.overlong_buffer_tokens is None
    yield no_buffer, "ppo.score", ("overlong_penalty",), "overlong_buffer_tokens is null"
    no_penalty = score.missing_eos_penalty is None and score.min_tokens is None
    reason = "there is neither missing_eos_penalty nor min_tokens"
    yield no_penalty, "ppo.score", ("penalty_mode",), reason
    reason = "truncation: mask leaves the responses out"
    yield ppo.truncation.masks, "ppo.score", ("missing_eos_penalty",), reason
