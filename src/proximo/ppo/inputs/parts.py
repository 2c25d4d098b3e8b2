"""Checks and converts other user inputs of the library: config, seed, tokenizer, reward, callbacks."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from proximo.callables import calling_problem, methods_problem
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ConfigError, DataError, ModelError
from proximo.models.adapted import is_adapted
from proximo.models.language import LanguageModel
from proximo.models.scalar import ScalarModel
from proximo.ppo.reference_answers import check_answers
from proximo.records import Prompt
from proximo.rewards.function import FunctionReward, RewardFunction
from proximo.rewards.source import RewardSource

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


def as_source(reward: RewardSource | RewardFunction | None) -> RewardSource | None:
    """A reward source unchanged; a function wrapped as a source. Raises ConfigError for anything else."""
    if reward is None:
        return None
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
    problems = [methods_problem(reward, ["score(responses)"])]
    if not isinstance(getattr(reward, "name", None), str):
        problems.append("it has no attribute name, the text under which its scores stand in the metrics")
    known = [problem for problem in problems if problem]
    if known or not isinstance(reward, RewardSource):
        raise ConfigError(f"reward cannot be used as a source of scores: {'; '.join(known)}")
    return reward


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
        raise ConfigError("no reward: pass reward= (a function or a source) to train or to the trainer")
    if on_step is not None and (problem := calling_problem(on_step, [1, {}])):
        raise ConfigError(f"on_step is called as on_step(number, metrics) after each step, but {problem}")
    if not prompts:
        raise DataError("there are no prompts to train on")
    if steps_done >= config.num_steps:
        raise ConfigError(f"all {config.num_steps} steps are done: use a config with more num_steps")
    if config.score.minus_reference_answer:
        check_answers(prompts)
