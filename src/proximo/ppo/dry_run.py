"""The lines of `--dry-run` for PPO: roles, reward sources, and the size of a step. Imports no torch."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from pkgutil import resolve_name

from proximo.config.engine import VLLMEngineConfig
from proximo.config.ppo.options import PPOConfig
from proximo.config.rewards.kinds import RewardSourceConfig
from proximo.config.rewards.sources import FunctionRewardConfig, ModelRewardConfig, RemoteRewardConfig
from proximo.config.rewards.verifiers import CountdownRewardConfig, MathsRewardConfig, VerifierRewardConfig
from proximo.data.formats.prompt_response import Exchange
from proximo.data.formats.row_formats import prompt_exchanges, prompt_metadata, text_exchanges
from proximo.data.formats.typed_columns import answer_cell
from proximo.data.load_report import Remark
from proximo.data.rows import Row
from proximo.errors import DataError, as_own_errors
from proximo.message_text import count_of
from proximo.ppo.recipe import PPORecipe
from proximo.rewards.function_binding import BoundFunction, bound_import
from proximo.run.dry_run import Line, data_lines, describe_model, describe_reference, trained_part
from proximo.run.preflight import reward_inputs
from proximo_verifiers import errors as verifiers

ON_BASE = ", on the policy's base, no second copy"


def dry_run(recipe: PPORecipe) -> Iterator[Line]:
    """One line for each thing that would be loaded, created or counted."""
    functions = _bound_functions(recipe)
    yield from _roles(recipe)
    yield from data_lines(recipe, recipe.data, partial(_read_rows, recipe=recipe, functions=functions))
    if recipe.ptx_data is not None and recipe.ppo.ptx is not None:
        learns_all = recipe.ptx_data.train_on == "everything"
        reader = partial(text_exchanges, form=recipe.ptx_data.form, learns_all=learns_all)
        for name, text in data_lines(recipe, recipe.ptx_data, reader):
            yield "ptx" if name == "data" else name, text
        yield "", f"{count_of(recipe.ppo.ptx.examples_per_update, 'text')} in each update"
    yield from _steps(recipe.ppo, recipe.data.max_prompt_tokens)


def _bound_functions(recipe: PPORecipe) -> list[BoundFunction]:
    """The reward functions, imported and bound. Raises ConfigError for one that the run would refuse."""
    sources = [*recipe.reward, *([recipe.gold] if recipe.gold else [])]
    bound = [
        bound_import(source.function, source.kwargs, name=repr(source.name))
        for source in sources
        if isinstance(source, FunctionRewardConfig)
    ]
    return [each for each in bound if each is not None]


def _read_rows(
    rows: Iterable[Row], remarks: Counter[Remark], *, recipe: PPORecipe, functions: Sequence[BoundFunction]
) -> Iterator[Exchange]:
    """Reads rows as the run does. Raises DataError for one that a reward function cannot be given."""
    rows = list(rows)
    for source in (*recipe.reward, recipe.gold):
        if isinstance(source, MathsRewardConfig | CountdownRewardConfig):
            _check_answers(source, rows)
    for row, function in product(rows, functions):
        answered = [] if row.values.get("answer") is None else ["answer"]
        columns = dict.fromkeys([*prompt_metadata(row), *answered])
        if problem := function.wanted.problem(columns):
            raise DataError(f"{row.origin}: reward function {function.name} {problem}")
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


def _roles(recipe: PPORecipe) -> Iterator[Line]:
    yield "policy", f"{describe_model(recipe.model)}, {trained_part(recipe.model)}"
    reference = describe_reference(recipe.model, recipe.reference) if recipe.ppo.kl.needs_reference else None
    yield "reference", reference or "none: ppo.kl is none"
    yield "value", _value(recipe)
    if recipe.engine.kind == "vllm":
        yield "engine", _engine(recipe.engine)
    if staleness := recipe.ppo.rollout.staleness:
        yield "rollout", f"sampled while the learner trains, at most {count_of(staleness, 'step')} ahead"
    if not recipe.reward:
        yield "reward", f"none: learns from the reference alone, with the KL in the {recipe.ppo.kl.kind}"
    for index, source in enumerate(recipe.reward):
        yield "reward", f"{_source(source, f'reward.{index}')}, weight {source.weight:g}"
    if recipe.gold is not None:
        yield "gold", f"{_source(recipe.gold, 'gold')}, watched only"


def _engine(engine: VLLMEngineConfig) -> str:
    if engine.addresses:
        return f"vLLM at {', '.join(engine.addresses)}"
    return f"vLLM, {engine.replicas} started by the run"


def _source(source: RewardSourceConfig, key: str) -> str:
    first, *_ = reward_inputs(source, key)
    match source:
        case FunctionRewardConfig():
            return f"{source.name}: function {first.name}"
        case VerifierRewardConfig():
            count = "one for each core" if source.workers is None else f"{source.workers}"
            limits = f"{source.answer_seconds:g} s for an answer, {source.step_seconds:g} s for a step"
            return f"{source.name}: verifier {first.name} in worker processes ({count}), {limits}"
        case RemoteRewardConfig():
            size, limit = count_of(source.responses_per_request, "response"), source.step_seconds
            return f"{source.name}: service at {first.name}, {size} in a request, {limit:g} s for a step"
        case ModelRewardConfig():
            return f"{source.name}: reward model {first}{ON_BASE if source.share_base else ''}"


def _value(recipe: PPORecipe) -> str:
    if not recipe.ppo.uses_critic:
        advantage = recipe.ppo.advantage
        return f"none: advantage {advantage.kind} " + (
            "compares responses instead" if advantage.needs_groups else "needs none"
        )
    if recipe.value.init_from == "trunk":
        head = "a fresh head" if recipe.value.path is None else f"the head of {describe_model(recipe.value)}"
        return f"{head} on the policy's own backbone, trained with it: value loss x {recipe.ppo.value_loss.weight:g}"
    scorer = next((source for source in recipe.reward if isinstance(source, ModelRewardConfig)), None)
    if recipe.value.init_from == "reward" and scorer is not None and scorer.share_base:
        return f"adapter and head of the reward model{ON_BASE}, trained further"
    origins = {
        "policy": "backbone of the policy, fresh head",
        "reward": "backbone and head of the reward model",
    }
    shared = ON_BASE if recipe.value.init_from == "policy" and recipe.value.lora and recipe.model.lora else ""
    return (
        f"{origins.get(recipe.value.init_from) or describe_model(recipe.value)}, {trained_part(recipe.value)}{shared}"
    )


def _steps(ppo: PPOConfig, max_prompt_tokens: int) -> Iterator[Line]:
    responses, of_update = ppo.responses_per_step, ppo.responses_per_update
    minibatches = -(-responses // of_update)
    updates = ppo.epochs_per_step * minibatches
    tokens = responses * (max_prompt_tokens + ppo.rollout.max_new_tokens)
    rest = responses % of_update
    uneven = f", the last of {rest}" if rest else ""
    prompts, scored = count_of(ppo.prompts_per_step, "prompt"), count_of(responses, "response")
    yield "one step", f"{prompts} x {ppo.responses_per_prompt:,} = {scored}"
    if ppo.samples_per_prompt is not None:
        sampled = ppo.prompts_per_step * ppo.samples_per_prompt
        kept = "best and worst" if ppo.policy_loss.is_pairwise else "best"
        yield "", f"the {kept} of {sampled:,} that are sampled and scored, {ppo.samples_per_prompt} to each prompt"
    cut = f"{count_of(minibatches, 'minibatch', 'minibatches')} of {of_update:,}{uneven}"
    yield "", f"{count_of(ppo.epochs_per_step, 'epoch')} x {cut} = {count_of(updates, 'update')}"
    yield "", f"at most {responses:,} x ({max_prompt_tokens:,} + {ppo.rollout.max_new_tokens:,}) = {tokens:,} tokens"
    if ppo.critic_warmup_steps:
        yield "", f"in the first {count_of(ppo.critic_warmup_steps, 'step')} the value model learns alone"
    yield (
        "whole run",
        f"{count_of(ppo.num_steps, 'step')}: {count_of(ppo.num_steps * responses, 'response')}, "
        f"{count_of(ppo.num_steps * updates, 'update')}, at most {count_of(ppo.num_steps * tokens, 'token')}",
    )
