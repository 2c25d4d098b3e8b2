"""The lines of `--dry-run` for PPO: roles, reward sources, and the size of a step. Imports no torch."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import product

from proximo.config.engine import VLLMEngineConfig
from proximo.config.ppo.options import PPOConfig
from proximo.config.rewards.kinds import RewardSourceConfig
from proximo.config.rewards.remote import RemoteRewardConfig
from proximo.config.rewards.sources import FunctionRewardConfig, ModelRewardConfig, VerifierRewardConfig
from proximo.data.formats.prompt_response import Exchange
from proximo.data.formats.row_formats import prompt_exchanges, prompt_metadata
from proximo.data.load_report import Remark
from proximo.data.rows import Row
from proximo.errors import DataError
from proximo.ppo.recipe import PPORecipe
from proximo.rewards.calling.binding import BoundFunction, bound_import
from proximo.run.dry_run import Line, data_lines, describe_model, describe_reference, trained_part
from proximo.run.preflight import data_inputs, reward_inputs

ON_BASE = ", on the policy's base, no second copy"


def dry_run(recipe: PPORecipe) -> Iterator[Line]:
    """One line for each thing that would be loaded, created or counted."""
    functions = _bound_functions(recipe)
    yield from _roles(recipe)
    yield from data_lines(recipe, recipe.data, partial(_read_rows, functions=functions))
    if recipe.ptx_data is not None and recipe.ppo.ptx is not None:
        for source in data_inputs(recipe.ptx_data, "ptx_data"):
            yield "ptx", f"{source}, {recipe.ppo.ptx.examples_per_update} texts in each update"
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
    rows: Iterable[Row], remarks: Counter[Remark], *, functions: Sequence[BoundFunction]
) -> Iterator[Exchange]:
    """Reads rows as the run does. Raises DataError for one that a reward function cannot be given."""
    rows = list(rows)
    for row, function in product(rows, functions):
        answered = [] if row.values.get("answer") is None else ["answer"]
        columns = dict.fromkeys([*prompt_metadata(row), *answered])
        if problem := function.wanted.problem(columns):
            raise DataError(f"{row.origin}: reward function {function.name} {problem}")
    return prompt_exchanges(rows, remarks)


def _roles(recipe: PPORecipe) -> Iterator[Line]:
    yield "policy", f"{describe_model(recipe.model)}, {trained_part(recipe.model)}"
    none = recipe.ppo.kl.apply_to == "none"
    yield "reference", "none: ppo.kl.apply_to is none" if none else describe_reference(recipe.model, recipe.reference)
    yield "value", _value(recipe)
    if recipe.engine.kind == "vllm":
        yield "engine", _engine(recipe.engine)
    if recipe.ppo.rollout.staleness:
        yield "rollout", f"sampled while the learner trains, at most {recipe.ppo.rollout.staleness} steps ahead"
    if not recipe.reward:
        yield "reward", f"none: learns from the reference alone, with the KL in the {recipe.ppo.kl.apply_to}"
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
            size, limit = source.responses_per_request, source.step_seconds
            return f"{source.name}: service at {first.name}, {size} responses in a request, {limit:g} s for a step"
        case ModelRewardConfig():
            return f"{source.name}: reward model {first}{ON_BASE if source.share_base else ''}"


def _value(recipe: PPORecipe) -> str:
    if not recipe.ppo.uses_critic:
        advantage = recipe.ppo.advantage
        return f"none: advantage {advantage.estimator} " + (
            "compares responses instead" if advantage.compares_groups else "needs none"
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
    yield "one step", f"{ppo.prompts_per_step:,} prompts x {ppo.responses_per_prompt:,} = {responses:,} responses"
    if ppo.samples_per_prompt is not None:
        sampled = ppo.prompts_per_step * ppo.samples_per_prompt
        kept = "best and worst" if ppo.policy_loss.is_pairwise else "best"
        yield "", f"the {kept} of {sampled:,} that are sampled and scored, {ppo.samples_per_prompt} to each prompt"
    yield "", f"{ppo.epochs_per_step} epochs x {minibatches} minibatches of {of_update:,}{uneven} = {updates:,} updates"
    yield "", f"at most {responses:,} x ({max_prompt_tokens:,} + {ppo.rollout.max_new_tokens:,}) = {tokens:,} tokens"
    if ppo.critic_warmup_steps:
        yield "", f"in the first {ppo.critic_warmup_steps:,} steps the value model learns alone"
    yield (
        "whole run",
        f"{ppo.num_steps:,} steps: {ppo.num_steps * responses:,} responses, {ppo.num_steps * updates:,} updates, "
        f"at most {ppo.num_steps * tokens:,} tokens",
    )
