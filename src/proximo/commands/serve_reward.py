"""Builds the reward sources of a recipe and serves them over HTTP until a signal ends it."""

import os
import signal
import socket
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import uvicorn

from proximo.config.rewards.kinds import RewardSourceConfig
from proximo.config.rewards.sources import ModelRewardConfig, RemoteRewardConfig
from proximo.errors import ConfigError, TrainingError
from proximo.http_service import http_server
from proximo.records import Prompt, Response, Scored
from proximo.rewards.protocol import SCHEMA
from proximo.rewards.service import RewardService, ServiceLimits
from proximo.rewards.source import CheckingSource, ClosableSource, RewardSource
from proximo.rewards.verifier_reward import VerifierReward
from proximo.rewards.weighted import WeightedReward
from proximo.run.checkpoint_lookup import verify_models
from proximo.run.make.reward_sources import build_source_without_model
from proximo.run.preflight import read_secret, reward_inputs

TOKENS_PER_MICROBATCH = 8192
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(
    configs: Sequence[RewardSourceConfig],
    address: tuple[str, int],
    *,
    token_env: str | None,
    limits: ServiceLimits,
    grace_seconds: int,
) -> int:
    """Serves the weighted sum of the sources. Returns 128 + the number of the signal that ended it.

    `grace_seconds`: after the signal, in which running requests may finish.

    Raises ConfigError if the address cannot be bound, and what building a source raises.
    """
    with ExitStack() as stack:
        listener = stack.enter_context(_listening(*address))
        sources = [(config.weight, stack.enter_context(_built(config))) for config in configs]
        token = None if token_env is None else read_secret(token_env)
        service = RewardService(WeightedReward(sources), limits=limits, token=token)
        server = http_server(service.application(), grace_seconds=grace_seconds)
        names = ", ".join(config.name for config in configs)
        host, port = listener.getsockname()[:2]
        said = f"[{host}]" if ":" in host else host
        print(f"serving {names} at http://{said}:{port} ({SCHEMA}, process {os.getpid()})", flush=True)
        return _run(server, listener)


class _OneAtATime:
    """Lets several threads use a source that supports one at a time, as all sources do except graded ones."""

    def __init__(self, source: RewardSource) -> None:
        self.name = source.name
        self.source = source
        self._lock = threading.Lock()

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """Score the responses when no other thread does."""
        with self._lock:
            return self.source.score(responses)

    def check_prompts(self, prompts: Sequence[Prompt], origins: Mapping[str, str]) -> None:
        """Check the prompts if the source can. Raises DataError for one whose responses cannot be scored."""
        if isinstance(self.source, CheckingSource):
            with self._lock:
                self.source.check_prompts(prompts, origins)


@contextmanager
def _built(config: RewardSourceConfig) -> Generator[RewardSource]:
    if isinstance(config, RemoteRewardConfig):
        raise ConfigError(f"reward source {config.name!r} is a remote service: let clients call {config.url} directly")
    source = _with_model(config) if isinstance(config, ModelRewardConfig) else build_source_without_model(config)
    try:
        yield source if isinstance(source, VerifierReward) else _OneAtATime(source)
    finally:
        if isinstance(source, ClosableSource):
            source.close()


def _with_model(config: ModelRewardConfig) -> RewardSource:
    """Uses the reward model's own tokenizer on the text that clients send."""
    from proximo.models.precision.placement import resolve_device, resolve_precision
    from proximo.run.make.models import DeviceSpec, build_reward_source

    if config.share_base:
        raise ConfigError(f"reward source {config.name!r} has share_base, but a server has no policy: remove it")
    verify_models(reward_inputs(config, "reward"))
    device_spec = DeviceSpec(device=resolve_device("auto"), precision=resolve_precision("float32"), seed=0)
    return build_reward_source(config, None, device_spec=device_spec, tokens_per_microbatch=TOKENS_PER_MICROBATCH)


def _listening(host: str, port: int) -> socket.socket:
    """Bind the address before anything is built, so that a taken address is reported at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {error}; use another --port, or --port 0 for a free one"
        ) from error


def _run(server: uvicorn.Server, listener: socket.socket) -> int:
    """Run until a signal. A second Ctrl-C does not wait for running requests."""
    received: list[int] = []

    def hear(number: int, _: object) -> None:
        received.append(number)
        server.should_exit = True  # for a signal that comes before the server hears them itself

    before = {number: signal.signal(number, hear) for number in SIGNALS}
    try:
        server.run(sockets=[listener])  # raises the signals that it got again, the first one last
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if not received:
        raise TrainingError("the server stopped; see its messages above")
    return 128 + received[-1]
