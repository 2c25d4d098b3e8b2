"""Builds reward sources that need no model. It is separate from `models.py`, so that a reward service starts fast."""

import warnings
from collections.abc import Iterable
from typing import cast

from proximo.config.rewards.kinds import WatchedSourceConfig
from proximo.config.rewards.sources import FunctionRewardConfig, RemoteRewardConfig
from proximo.config.rewards.verifiers import VerifierRewardConfig
from proximo.config.schema.base import Section
from proximo.distributed.world import current
from proximo.errors import ConfigError
from proximo.rewards.function import FunctionReward
from proximo.rewards.function_binding import import_function
from proximo.rewards.remote import RemoteLimits, RemoteReward
from proximo.rewards.source import RewardSource, source_problem
from proximo.rewards.verifier_reward import VerifierReward
from proximo.run.preflight import read_secret
from proximo_verifiers.grader import num_cores


def build_source_without_model(config: WatchedSourceConfig) -> RewardSource:
    """A source whose workers have started, or whose remote service has answered once.

    Raises ConfigError if the function or service does not exist, and what building a verifier raises.
    """
    match config:
        case FunctionRewardConfig():
            return _function_reward(config)
        case RemoteRewardConfig():
            return _remote_reward(config)
        case VerifierRewardConfig():
            return _verifier_reward(config)


def _function_reward(config: FunctionRewardConfig) -> RewardSource:
    """The function as a source, or the object with a method `score` at its import path."""
    found = import_function(config.function)
    if isinstance(found, type) or not hasattr(found, "score"):
        return FunctionReward(found, name=config.name, kwargs=config.kwargs, timeout_seconds=config.timeout_seconds)
    if problem := source_problem(found):
        raise ConfigError(f"reward {config.function} cannot be used as a source of scores: {problem}")
    source = cast("RewardSource", found)
    if source.name != config.name or config.kwargs:
        raise ConfigError(
            f"reward {config.function} is an object with a method score and the name {source.name!r}: set name to "
            "that, and remove kwargs, which only a function takes"
        )
    return source


def check_sources(configs: Iterable[Section]) -> None:
    """Contact each remote service, and import and bind each reward function, once, on rank 0.

    Raises ConfigError if a service does not answer or a function cannot be used.
    """
    kinds = (RemoteRewardConfig, FunctionRewardConfig)
    checked = [config for config in configs if isinstance(config, kinds)]

    def check() -> None:
        for config in checked:
            source = build_source_without_model(config)
            if isinstance(source, FunctionReward | RemoteReward):  # not a user's object
                source.close()

    current().on_rank_0(check, what="the check of reward sources")


def _verifier_reward(config: VerifierRewardConfig) -> VerifierReward:
    for caveat in config.caveats():
        warnings.warn(f"reward source {config.name!r}: {caveat}", stacklevel=3)
    memory = config.memory_of_a_worker_mib
    return VerifierReward(
        config.verifier_path(),
        name=config.name,
        options=config.verifier_options(),
        num_workers=config.workers or num_cores(),
        answer_seconds=config.answer_seconds,
        step_seconds=config.step_seconds,
        memory_bytes=None if memory is None else memory * 2**20,
    )


def _remote_reward(config: RemoteRewardConfig) -> RemoteReward:
    limits = RemoteLimits(
        responses_per_request=config.responses_per_request,
        max_concurrent_requests=config.max_concurrent_requests,
        request_seconds=config.request_seconds,
        step_seconds=config.step_seconds,
    )
    token = None if config.token_env is None else read_secret(config.token_env)
    source = RemoteReward(config.url, name=config.name, limits=limits, token=token, token_env=config.token_env)
    try:
        source.check()
    except ConfigError:
        source.close()
        raise
    return source
