"""What a recipe would do, in numbers: the text of `--dry-run`. Loads no model, writes nothing, imports no torch."""

from collections.abc import Iterator
from pathlib import Path

from proximo.checkpoint.run_folder import is_run_folder, steps_of_run
from proximo.commands.foresight import rows_of
from proximo.config.ppo.options import PPOConfig
from proximo.config.recipes import DPORecipe, PipelineRecipe, PPORecipe, RewardRecipe, SFTRecipe
from proximo.config.rewards.kinds import RewardSourceConfig
from proximo.config.rewards.remote import RemoteRewardConfig
from proximo.config.rewards.sources import FunctionRewardConfig, ModelRewardConfig, VerifierRewardConfig
from proximo.config.run import ModelConfig, RunConfig, ScalarModelConfig
from proximo.config.schema.base import Section
from proximo.run.preflight import data_inputs, model_input, reward_inputs

NAME_WIDTH = 12
ON_BASE = ", on the policy's base, no second copy"


def describe(recipe: Section) -> str:
    """One line for each thing that would be loaded, made or counted."""
    return "\n".join(_lines(recipe))


def _lines(recipe: Section) -> Iterator[str]:
    match recipe:
        case PipelineRecipe():
            yield f"pipeline in {recipe.run.folder}"
            for name, stage in (("sft", recipe.sft), ("reward", recipe.reward), ("ppo", recipe.ppo)):
                yield f"\nstage {name}" + ("" if stage is not None else ": left out")
                if stage is not None:
                    yield from _lines(stage)
        case SFTRecipe():
            yield from _run(recipe.run)
            yield _line("model", f"{_model(recipe.model)}, {_trained(recipe.model)}")
            yield from _data(recipe)
            batch = f"{recipe.sft.examples_per_step} examples"
            yield from _epochs(batch, recipe.sft.num_epochs, "examples", recipe.data.max_tokens)
        case RewardRecipe():
            yield from _run(recipe.run)
            yield _line("model", f"{_model(recipe.model)} with a score head, {_trained(recipe.model)}")
            yield from _data(recipe)
            batch = f"{recipe.reward.pairs_per_step} pairs (two sequences each)"
            yield from _epochs(batch, recipe.reward.num_epochs, "pairs", recipe.data.max_tokens)
        case DPORecipe():
            yield from _run(recipe.run)
            yield _line("model", f"{_model(recipe.model)}, {_trained(recipe.model)}")
            yield _line("reference", _reference(recipe.model, recipe.reference))
            yield from _data(recipe)
            batch = f"{recipe.dpo.pairs_per_step} pairs (two sequences each, read by policy and reference)"
            yield from _epochs(batch, recipe.dpo.num_epochs, "pairs", recipe.data.max_tokens)
        case PPORecipe():
            yield from _run(recipe.run)
            yield from _roles(recipe)
            yield from _data(recipe)
            if recipe.ptx_data is not None and recipe.ppo.ptx is not None:
                for each in data_inputs(recipe.ptx_data, "ptx_data"):
                    yield _line("ptx", f"{each}, {recipe.ppo.ptx.examples_per_update} texts in each update")
            yield from _steps(recipe.ppo, recipe.data.max_prompt_tokens)


def _line(name: str, text: str) -> str:
    return f"  {name:<{NAME_WIDTH}} {text}"


def _run(run: RunConfig) -> Iterator[str]:
    yield _line("run", f"{run.folder} ({_state(Path(run.folder))}), seed {run.seed}, {run.device}, {run.precision}")
    for sink in run.sinks:
        yield _line("sink", f"{sink.label}, run {sink.name or run.folder}")


def _state(folder: Path) -> str:
    if not is_run_folder(folder):
        return "new" if not folder.exists() else "exists"
    steps = steps_of_run(folder)
    where = f"at step {steps[-1]}" if steps else "without a checkpoint"
    return f"holds a run {where}: --resume goes on, --overwrite replaces it"


def _model(model: ModelConfig | ScalarModelConfig) -> str:
    return str(model_input(model, "model"))


def _trained(model: ModelConfig | ScalarModelConfig) -> str:
    lora = model.lora
    if lora is None:
        return "trained whole"
    targets = lora.target_modules if isinstance(lora.target_modules, str) else ", ".join(lora.target_modules)
    stored = "" if model.quantisation == "none" else f", its base in {model.quantisation}"
    return f"LoRA of rank {lora.rank} on {targets}{stored}"


def _roles(recipe: PPORecipe) -> Iterator[str]:
    yield _line("policy", f"{_model(recipe.policy)}, {_trained(recipe.policy)}")
    none = recipe.ppo.kl.apply_to == "none"
    yield _line("reference", "none: ppo.kl.apply_to is none" if none else _reference(recipe.policy, recipe.reference))
    yield _line("value", _value(recipe))
    for index, source in enumerate(recipe.reward):
        yield _line("reward", f"{_source(source, f'reward.{index}')}, weight {source.weight:g}")
    if recipe.gold is not None:
        yield _line("gold", f"{_source(recipe.gold, 'gold')}, watched only")


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


def _reference(policy: ModelConfig, reference: ModelConfig | None) -> str:
    if policy.lora is not None:
        return "the policy's base, no second copy"
    return "a frozen copy of the policy" if reference is None else f"{_model(reference)}, frozen"


def _value(recipe: PPORecipe) -> str:
    if not recipe.ppo.uses_critic:
        advantage = recipe.ppo.advantage
        return f"none: advantage {advantage.estimator} " + (
            "compares responses instead" if advantage.compares_groups else "needs none"
        )
    if recipe.value.init_from == "trunk":
        head = "a fresh head" if recipe.value.path is None else f"the head of {_model(recipe.value)}"
        return f"{head} on the policy's own backbone, trained with it: value loss x {recipe.ppo.value_loss.weight:g}"
    scorer = next((source for source in recipe.reward if isinstance(source, ModelRewardConfig)), None)
    if recipe.value.init_from == "reward" and scorer is not None and scorer.share_base:
        return f"adapter and head of the reward model{ON_BASE}, trained further"
    origins = {
        "policy": "backbone of the policy, fresh head",
        "reward": "backbone and head of the reward model",
    }
    shared = ON_BASE if recipe.value.init_from == "policy" and recipe.value.lora and recipe.policy.lora else ""
    return f"{origins.get(recipe.value.init_from) or _model(recipe.value)}, {_trained(recipe.value)}{shared}"


def _data(recipe: SFTRecipe | RewardRecipe | DPORecipe | PPORecipe) -> Iterator[str]:
    for each in data_inputs(recipe.data, "data"):
        purpose = "evaluation" if ".evaluation_sources." in f".{each.key}" else "data"
        yield _line(purpose, str(each))
    if recipe.data.proportions is not None and recipe.data.phase is not None:
        part = recipe.data.proportions[recipe.data.phase] / sum(recipe.data.proportions)
        yield _line("", f"part {recipe.data.phase} of {len(recipe.data.proportions)}: {part:.0%} of the rows")
    rows = rows_of(recipe)
    if rows is not None:
        yield _line("", f"{len(rows.training):,} rows to learn from, {len(rows.held_out):,} to evaluate on")
    elif recipe.data.held_out_rows:
        yield _line("", f"{recipe.data.held_out_rows:,} rows held out for evaluation")


def _epochs(batch: str, num_epochs: float, what: str, max_tokens: int) -> Iterator[str]:
    yield _line("one step", f"{batch}, one update")
    yield _line("whole run", f"{num_epochs:g} passes over the data, {what} of at most {max_tokens:,} tokens")


def _steps(ppo: PPOConfig, max_prompt_tokens: int) -> Iterator[str]:
    responses, of_update = ppo.responses_per_step, ppo.responses_per_update
    minibatches = -(-responses // of_update)
    updates = ppo.epochs_per_step * minibatches
    tokens = responses * (max_prompt_tokens + ppo.rollout.max_new_tokens)
    rest = responses % of_update
    uneven = f", the last of {rest}" if rest else ""
    yield _line(
        "one step", f"{ppo.prompts_per_step:,} prompts x {ppo.responses_per_prompt:,} = {responses:,} responses"
    )
    if ppo.samples_per_prompt is not None:
        sampled = ppo.prompts_per_step * ppo.samples_per_prompt
        yield _line("", f"the best of {sampled:,} that are sampled and scored, {ppo.samples_per_prompt} to each prompt")
    yield _line(
        "", f"{ppo.epochs_per_step} epochs x {minibatches} minibatches of {of_update:,}{uneven} = {updates:,} updates"
    )
    yield _line(
        "",
        f"at most {responses:,} x ({max_prompt_tokens:,} + {ppo.rollout.max_new_tokens:,}) = {tokens:,} tokens",
    )
    if ppo.critic_warmup_steps:
        yield _line("", f"in the first {ppo.critic_warmup_steps:,} steps the value model learns alone")
    yield _line(
        "whole run",
        f"{ppo.num_steps:,} steps: {ppo.num_steps * responses:,} responses, {ppo.num_steps * updates:,} updates, "
        f"at most {ppo.num_steps * tokens:,} tokens",
    )
