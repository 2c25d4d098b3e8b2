"""Checks and converts other user inputs of the library: config, seed, tokenizer, reward, callbacks."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from proximo.config.ppo.options import PPOConfig
from proximo.config.ppo.run_checks import distillation_problem
from proximo.distributed.world import current
from proximo.errors import ConfigError, DataError, ModelError
from proximo.message_text import count_of
from proximo.models.adapter_detection import is_adapted
from proximo.models.language import LanguageModel
from proximo.models.scalar import ScalarModel
from proximo.ppo.reference_answers import check_answers
from proximo.records import Prompt
from proximo.rewards.function import FunctionReward
from proximo.rewards.source import CheckingSource, NoReward, RewardSource, source_problem
from proximo.rewards.token_rewards import is_list
from proximo.rewards.weighted import Reward, WeightedReward, as_pairs
from proximo_verifiers.callables import calling_problem

LARGEST_SEED = 2**31 - 1
"""The same limit as in recipes."""


def check_config(config: Any) -> None:
    """Raises ConfigError for anything but a PPOConfig or None."""
    if config is None or isinstance(config, PPOConfig):
        return
    advice = (
        "write PPOConfig(**config)" if isinstance(config, Mapping) else "make one by name: PPOConfig(num_steps=...)"
    )
    got = f"the class {config.__name__}" if isinstance(config, type) else type(config).__name__
    raise ConfigError(f"config must be a PPOConfig, got {got}: {advice}")


def as_seed(seed: Any) -> int:
    """An integer of any type (NumPy, torch) as a Python int. Raises ConfigError for anything else."""
    try:
        number = None if isinstance(seed, bool) else operator.index(seed)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None or not 0 <= number <= LARGEST_SEED:
        raise ConfigError(f"the seed must be a whole number of at least 0 and below 2**31, got {seed!r:.60}")
    return number


def check_tokenizer(tokenizer: Any) -> None:
    """Raises ModelError for anything but a transformers tokenizer."""
    from transformers import PreTrainedTokenizerBase

    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return
    if isinstance(tokenizer, str):
        advice = f"load it: AutoTokenizer.from_pretrained({tokenizer!r})"
    elif isinstance(getattr(tokenizer, "tokenizer", None), PreTrainedTokenizerBase):
        advice = "this processor holds one: give its attribute tokenizer"
    else:
        advice = "load the policy's with AutoTokenizer.from_pretrained(path)"
    raise ModelError(f"tokenizer must be a tokenizer of transformers, got {type(tokenizer).__name__}: {advice}")


def as_source(reward: Reward | None, *, task: str | None = None) -> RewardSource | None:
    """A reward source unchanged; a function wrapped as a source; a list as its weighted sum, with `task` as there.

    Raises ConfigError for anything else.
    """
    if reward is None:
        return None
    if is_list(reward):
        return WeightedReward([(weight, _as_single(source)) for weight, source in as_pairs(reward)], task=task)
    return _as_single(reward)


def _as_single(reward: Any) -> RewardSource:
    from transformers import PreTrainedModel

    if isinstance(reward, ScalarModel | LanguageModel | PreTrainedModel) or is_adapted(reward):
        raise ConfigError(
            f"reward is a model ({type(reward).__name__}), which reads token ids: make it a source, "
            "ModelReward(ScalarModel(model)) for a sequence classifier with one label that reads the policy's tokens, "
            "and with tokenizer=... for one that has its own"
        )
    if isinstance(reward, type):
        raise ConfigError(
            f"reward is the class {reward.__name__}, not an object of it: write reward={reward.__name__}(...)"
        )
    if not hasattr(reward, "score"):
        if not callable(reward):
            raise ConfigError(f"reward must be a function or a source with a method score, got {type(reward).__name__}")
        return FunctionReward(reward)
    if problem := source_problem(reward):
        raise ConfigError(f"reward cannot be used as a source of scores: {problem}")
    return cast("RewardSource", reward)


def check_rows(source: RewardSource | None, prompts: Sequence[Prompt]) -> None:
    """Raises DataError for a prompt whose responses the source cannot score."""
    if isinstance(source, CheckingSource):
        checking = source
        current().once(lambda: checking.check_prompts(prompts, {}), what="the check of prompts by reward sources")


def check_learning(source: RewardSource | None, config: PPOConfig, *, has_teacher: bool) -> None:
    """Raises ConfigError for `NoReward` without a teacher to learn from, or with options that need scores."""
    if isinstance(source, NoReward) and (problem := distillation_problem(config, has_teacher=has_teacher)):
        raise ConfigError(problem)


def check_training(
    prompts: Sequence[Prompt],
    config: PPOConfig,
    *,
    scored: bool,
    on_step: Callable[[int, Mapping[str, float]], Any] | None,
    steps_done: int,
) -> None:
    """Raises DataError for prompts that cannot be trained on, ConfigError if no step is left, no scores will come
    (`scored` is False), or `on_step` has the wrong signature."""
    if not scored:
        raise ConfigError(
            "no reward: pass reward= (a function or a source) to train or to the trainer; NoReward() learns "
            "from reference= alone"
        )
    if on_step is not None and (problem := calling_problem(on_step, [1, {}], names=("number", "metrics"))):
        raise ConfigError(f"on_step is called as on_step(number, metrics) after each step, but {problem}")
    if not prompts:
        raise DataError("there are no prompts to train on")
    if steps_done >= config.num_steps:
        raise ConfigError(
            f"the run has taken its {count_of(config.num_steps, 'step')}: use a config with more num_steps"
        )
    if config.score.minus_reference_answer:
        check_answers(prompts)
