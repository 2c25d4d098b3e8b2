"""Checks and converts what PPOTrainer is made of: models, tokenizer, config, seed, reward and callbacks."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from proximo.config.environment import EpisodeLimits
from proximo.config.ppo.options import PPOConfig
from proximo.config.ppo.run_checks import distillation_problem, environment_problem
from proximo.distributed.world import current
from proximo.environments.engine import Arena
from proximo.environments.reward import EnvironmentReward
from proximo.errors import ConfigError, DataError, ModelError
from proximo.message_text import count_of
from proximo.models.heads import check_same_rows
from proximo.models.language import LanguageModel
from proximo.models.pretrained.vocabulary import check_vocabulary, embedding_rows
from proximo.models.scalar import ScalarModel
from proximo.models.sharing import refuse_half_shared
from proximo.models.transformers_model import base_of, check_lengths, is_adapted
from proximo.ppo.roles.worker import ServedReferenceWorker, check_answers
from proximo.records import Prompt
from proximo.rewards.function import FunctionReward
from proximo.rewards.model import ModelReward
from proximo.rewards.source import CheckingSource, NoReward, RewardSource, is_list, source_problem
from proximo.rewards.weighted import Reward, WeightedReward, as_pairs
from proximo_verifiers.callables import calling_problem

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LARGEST_SEED = 2**31 - 1
"""The same limit as in recipes."""


def check_models(
    policy: LanguageModel,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    reference: LanguageModel | ServedReferenceWorker | None = None,
    value: ScalarModel | Literal["trunk"] | None = None,
    moves: bool = False,
    played: Arena | EpisodeLimits | None = None,
) -> None:
    """Raises ModelError for incompatible models or weights in half precision, ConfigError for long episodes.

    A reference under bf16 may have them (`narrow_frozen`), unless it `moves`, that is follows the policy.
    """
    value = None if isinstance(value, str) else value
    reference = None if isinstance(reference, ServedReferenceWorker) else reference
    stays_narrow = reference is not None and reference.precision.is_half and not moves
    for role, model in (("policy", policy), ("reference", reference), ("value", value)):
        if model is not None and not (stays_narrow and role == "reference"):
            _check_full_precision(model, role=role)
        if model is not None and played is not None:
            limits = played.limits if isinstance(played, Arena) else played
            lengths = {"max_prompt_tokens": limits.max_tokens, "max_response_tokens": 0}
            check_lengths(model.base.config, role=role, section="environment", **lengths)
    check_vocabulary(policy.base, tokenizer, role="policy")
    if policy.has_adapter and moves:
        raise ModelError(
            "kl.reference_every_steps moves the reference, but that of a policy with an adapter is the base below it: "
            "leave it out, or bring a policy without an adapter"
        )
    if reference is not None:
        check_same_rows(policy.vocab_size, reference.vocab_size)
        check_vocabulary(reference.base, tokenizer, role="reference")
    if value is not None:
        refuse_half_shared(value, policy)
    if value is not None and embedding_rows(value.base) < policy.vocab_size:
        raise ModelError(
            f"the value model embeds {embedding_rows(value.base)} tokens, but the policy may write any of "
            f"{policy.vocab_size}: bring a value model with the policy's vocabulary"
        )


def _check_full_precision(model: LanguageModel | ScalarModel, *, role: str) -> None:
    narrow = next((p.dtype for p in model.model.parameters() if p.dtype in (torch.bfloat16, torch.float16)), None)
    if narrow is not None:
        raise ModelError(
            f"the {role} model has weights in {str(narrow).removeprefix('torch.')}, in which PPO's small updates round "
            "to nothing: load it with dtype=torch.float32 (Precision.BF16 computes in bfloat16 above such weights)"
        )


def as_policy(model: "LanguageModel | PreTrainedModel") -> LanguageModel:
    """A LanguageModel unchanged; a transformers model wrapped and probed, like a model that is loaded from disk.

    Raises ModelError for anything else, and for a model without trainable weights.
    """
    policy = _as_language_model(model, role="policy")
    if not policy.trainable_parameters():
        raise ModelError("the policy has no weight that requires a gradient, so nothing could be learned")
    return policy


def as_reference(
    model: "LanguageModel | PreTrainedModel | ServedReferenceWorker | None", policy: LanguageModel
) -> LanguageModel | ServedReferenceWorker | None:
    """Like `as_policy`, but frozen; a served one unchanged. Raises ModelError if it is the policy itself."""
    if isinstance(model, ServedReferenceWorker | None):
        return model
    reference = _as_language_model(model, role="reference")
    if reference.model is policy.model:
        raise ModelError(
            "the reference is the policy itself, and would move with it: leave reference out, and a frozen copy is made"
        )
    reference.model.requires_grad_(False).eval()
    return reference


def as_value(
    model: "ScalarModel | PreTrainedModel | Literal['trunk'] | None",
) -> ScalarModel | Literal["trunk"] | None:
    """A ScalarModel or "trunk" unchanged; a sequence classifier with one label wrapped as a ScalarModel.

    Raises ModelError for anything else.
    """
    from transformers import PreTrainedModel

    if model is None or model == "trunk" or isinstance(model, ScalarModel):
        return model
    if not isinstance(model, PreTrainedModel):
        got = repr(model) if isinstance(model, str) else type(model).__name__
        raise ModelError(
            f'value must be a ScalarModel or a sequence classifier, got {got}; "trunk" puts a head on the policy'
        )
    return ScalarModel(model)


def _as_language_model(model: "LanguageModel | PreTrainedModel", *, role: str) -> LanguageModel:
    from transformers import PreTrainedModel

    from proximo.models.probe import probe_language_model

    if isinstance(model, LanguageModel):
        return model
    if not isinstance(model, PreTrainedModel) and not is_adapted(model):
        raise ModelError(
            f"the {role} must be a model of transformers or a LanguageModel, got {type(model).__name__}: load it, "
            "for example with AutoModelForCausalLM.from_pretrained(path, dtype='float32')"
        )
    if base_of(model).get_output_embeddings() is None:
        raise ModelError(
            f"the {role} must be a language model, got {type(base_of(model)).__name__}, which has no output layer over "
            "the vocabulary: load it with AutoModelForCausalLM"
        )
    language_model = LanguageModel(model)
    _check_full_precision(language_model, role=role)  # before the probe, which would fail with a misleading reason
    probe_language_model(language_model)
    return language_model


def check_engine(engine: Any) -> None:
    """Raises ConfigError for what samples nothing."""
    if engine is not None and not callable(getattr(engine, "generate", None)):
        raise ConfigError(
            f"engine must be an object with the methods of proximo.rollout.engine.Engine, got {engine!r:.60}"
        )


def check_config(config: Any) -> None:
    """Raises ConfigError for anything but a PPOConfig or None."""
    if not isinstance(config, PPOConfig | None):
        raise ConfigError(f"config must be a PPOConfig, got {config!r:.60}: write PPOConfig(num_steps=...)")


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

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ModelError(
            f"tokenizer must be a tokenizer of transformers, got {type(tokenizer).__name__}: load the policy's with "
            "AutoTokenizer.from_pretrained(path); of a processor it is the attribute tokenizer"
        )


def as_source(reward: Reward | None, *, task: str | None = None) -> RewardSource | None:
    """A reward source unchanged; a function wrapped as a source; a list as its weighted sum, with `task` as there.

    Raises ConfigError for anything else.
    """
    if is_list(reward):
        return WeightedReward([(weight, _as_single(source)) for weight, source in as_pairs(reward)], task=task)
    return None if reward is None else _as_single(reward)


def _as_single(reward: Any) -> RewardSource:
    from transformers import PreTrainedModel

    if isinstance(reward, type):
        raise ConfigError(
            f"reward is the class {reward.__name__}, not an object of it: write reward={reward.__name__}(...)"
        )
    if isinstance(reward, ScalarModel | LanguageModel | PreTrainedModel) or is_adapted(reward):
        raise ConfigError(
            f"reward is a model ({type(reward).__name__}), which reads token ids: a sequence classifier with one label "
            "is a source as ModelReward(ScalarModel(model)), which takes tokenizer=... for one with its own tokens"
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
        current().on_rank_0(lambda: checking.check_prompts(prompts, {}), what="the check of prompts by reward sources")


def check_learning(source: RewardSource | None, config: PPOConfig, *, has_teacher: bool) -> None:
    """Raises ConfigError for `NoReward` without a teacher to learn from, or with options that need scores."""
    if isinstance(source, NoReward) and (problem := distillation_problem(config, has_teacher=has_teacher)):
        raise ConfigError(problem)


def earns(source: RewardSource | None, environments: Arena | None) -> bool:
    """Whether responses get scores: not from a class of tools without `get_reward` alone."""
    if source is None or environments is None or environments.gives_reward:
        return source is not None
    return any(not isinstance(each, EnvironmentReward) for _, each in as_pairs(source))


def check_environment(reward: Reward, config: PPOConfig) -> None:
    """Raises ConfigError for options that no episode can have, and for rewards by models, which read one response."""
    models = [str(source.name) for _, source in as_pairs(reward) if isinstance(source, ModelReward)]
    if problem := environment_problem(config, reads_text=models):
        raise ConfigError(f"environment: {problem}")


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
            "no reward: pass reward= (a function or a source) to train or to the trainer; a class of tools may have "
            "get_reward() instead, and NoReward() learns from reference= alone"
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
