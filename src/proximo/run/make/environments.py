"""Makes what a run plays in, from a section of its recipe or from a class that is given in Python."""

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from proximo.config.environment import (
    EnvironmentConfig,
    ProgramEnvironmentConfig,
    ToolsEnvironmentConfig,
    VerifiersEnvironmentConfig,
    WorkerEnvironmentConfig,
)
from proximo.distributed.world import current
from proximo.environments.adapters.tools import gives_reward, tools_of
from proximo.environments.engine import Arena, Limits
from proximo.environments.players.pool import EnvironmentPool
from proximo.environments.tool_calls import ToolStyle
from proximo.environments.turn_renderer import TurnRenderer
from proximo.environments.verifiers_process import VerifiersProcess
from proximo.errors import ConfigError
from proximo.http_client import MIN_TOKEN_CHARACTERS
from proximo.run.preflight import read_secret

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonEnvironment:
    """An environment that is given in Python and runs in threads of this process, and the limits of its episodes.

    `PPOTrainer(environment=MyEnvironment)` means `PythonEnvironment(make=MyEnvironment)`. A thread that hangs cannot be
    ended, and memory is not limited: a recipe runs environments in processes.
    """

    make: Callable[[], Any]
    """The class with `reset` and `step` (`Environment`), or a function that makes one; for `tools` the class itself, or
    a `functools.partial` of it."""
    max_turns: int = 16
    """Turns of the policy in an episode."""
    max_tokens: int = 1024
    """Most tokens of a call: the conversation so far, which the policy reads, and the turn that it writes."""
    max_seconds: float | None = None
    """An episode that is older begins no further turn; None: no such limit."""
    max_observation_tokens: int | None = 512
    """Tokens of one observation. A longer one is cut, with a mark."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template reads besides messages and tools."""
    tools: bool = False
    """`make` is a class in TRL's form, whose public methods are tools, as kind `tools` of a recipe."""
    tool_style: ToolStyle | None = None
    """How the policy writes calls; None for the style of its chat template."""
    workers: int = 64
    """Episodes that are played at once."""
    timeout_seconds: float = 60.0
    """Wall-clock limit of one `reset` or `step`."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a limit that is out of range."""
        _check_limits(self, max_turns=1, max_tokens=2, workers=1, max_observation_tokens=1)

    def arena(self, tokenizer: "PreTrainedTokenizerBase") -> Arena:
        """What engines play in."""
        from proximo.environments.players.threads import ThreadPlayers

        renderer = TurnRenderer(
            tokenizer,
            variables=self.template_variables,
            tool_style=self.tool_style,
            max_observation_tokens=self.max_observation_tokens,
        )
        if self.tools:
            renderer.check_tools()
        make = tools_of(self.make, renderer.tool_style, {}) if self.tools else self.make
        name = getattr(self.make, "__name__", type(self.make).__name__)
        options = {"workers": self.workers, "timeout_seconds": self.timeout_seconds}
        pool = EnvironmentPool(ThreadPlayers(make), name=name, **options)
        limits = Limits(max_turns=self.max_turns, max_tokens=self.max_tokens, max_seconds=self.max_seconds)
        earns = not self.tools or gives_reward(self.make)
        return Arena(environments=pool, renderer=renderer, limits=limits, gives_reward=earns)


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonAgent:
    """An agent that is given in Python and runs in threads of this process, and the limits of its trajectories.

    It finds the model by its argument `base_url`: environment variables are not set, since all threads share them.
    """

    run: Callable[..., Any]
    """Called as `run(base_url=..., row=..., seed=...)`: returns the reward, or a mapping with `reward`."""
    max_turns: int = 16
    """Calls of the policy in a trajectory."""
    max_tokens: int = 1024
    """Tokens that the policy reads and writes in one call."""
    max_seconds: float | None = None
    """A trajectory that is older makes no further call; None: no such limit."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template reads besides messages and tools."""
    workers: int = 64
    """Programs that run at once."""
    timeout_seconds: float = 600.0
    """Wall-clock limit of one program."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a limit that is out of range."""
        _check_limits(self, max_turns=1, max_tokens=2, workers=1)

    def arena(self, tokenizer: "PreTrainedTokenizerBase") -> Arena:
        """What engines play in."""
        from proximo.environments.players.threads import ThreadPlayers
        from proximo.environments.programs import FunctionAgent

        name = getattr(self.run, "__name__", type(self.run).__name__)
        options = {"workers": self.workers, "timeout_seconds": self.timeout_seconds}
        pool = EnvironmentPool(ThreadPlayers(lambda: FunctionAgent(self.run)), name=name, **options)
        limits = Limits(max_turns=self.max_turns, max_tokens=self.max_tokens, max_seconds=self.max_seconds)
        return _served(pool, tokenizer, self.template_variables, limits)


def _check_limits(given: PythonEnvironment | PythonAgent, **least: int) -> None:
    """Raises ConfigError for a limit that is no number, or out of range. `least`: whole numbers, with the smallest."""
    for name, minimum in least.items():
        value = getattr(given, name)
        may_be_none = name == "max_observation_tokens"
        if not (type(value) is int and value >= minimum) and not (value is None and may_be_none):
            raise ConfigError(f"{name} of an environment must be a whole number of at least {minimum}, got {value!r}")
    for name in ("timeout_seconds", "max_seconds"):
        value = getattr(given, name)
        if not (type(value) in (int, float) and value > 0) and not (value is None and name == "max_seconds"):
            raise ConfigError(f"{name} of an environment must be a number above 0, got {value!r}")


def as_environments(given: Any, tokenizer: "PreTrainedTokenizerBase") -> Arena | None:
    """What engines play in: for a class, a function, a `PythonEnvironment` or a `PythonAgent`; None for None.

    Raises ConfigError for anything else, and for an environment that cannot be made.
    """
    if given is None or isinstance(given, Arena):
        return given
    if isinstance(given, PythonEnvironment | PythonAgent):
        return given.arena(tokenizer)
    if not callable(given):
        raise ConfigError(
            "environment must be a class with reset and step, a function that makes an environment, a "
            f"PythonEnvironment or a PythonAgent, got {type(given).__name__}"
        )
    return PythonEnvironment(make=given).arena(tokenizer)


def make_environments(
    config: EnvironmentConfig, tokenizer: "PreTrainedTokenizerBase", *, on_every_rank: bool, is_rewarded: bool = True
) -> Arena:
    """What the engines of a recipe play in. Environments start now, in worker processes, on the ranks that play.

    `is_rewarded`: by others than the environment. Raises ConfigError for an environment that cannot be imported or
    made, for tools whose calls in the style of the chat template would not be read, and where nothing rewards.
    """
    limits = Limits(max_turns=config.max_turns, max_tokens=config.max_tokens, max_seconds=config.max_seconds)
    renderer = TurnRenderer(
        tokenizer,
        variables=config.template_variables,
        tool_style=config.tool_style if isinstance(config, ToolsEnvironmentConfig) else None,
        max_observation_tokens=config.max_observation_tokens,
    )
    if isinstance(config, ToolsEnvironmentConfig):
        renderer.check_tools()
    plays = on_every_rank or current().leads
    if isinstance(config, ProgramEnvironmentConfig) and plays:
        return _agents(config, tokenizer, limits)
    path, options = config.made_by(renderer.tool_style)
    if isinstance(config, ToolsEnvironmentConfig):
        options |= {"is_rewarded": is_rewarded}
    return Arena(environments=_started(config, path, options) if plays else None, renderer=renderer, limits=limits)


def _agents(config: ProgramEnvironmentConfig, tokenizer: "PreTrainedTokenizerBase", limits: Limits) -> Arena:
    """Programs, with the server that they ask, and a process of verifiers if they are its episodes."""
    token = None if config.token_env is None else read_secret(config.token_env)
    if token is not None and len(token) < MIN_TOKEN_CHARACTERS:
        raise ConfigError(
            f"the token in the environment variable {config.token_env} (environment.token_env) has {len(token)} "
            f"characters: it needs {MIN_TOKEN_CHARACTERS} or more, as from `openssl rand -hex 16`"
        )
    path, options = config.made_by("")
    with ExitStack() as started:
        helper = None
        if isinstance(config, VerifiersEnvironmentConfig):
            helper = VerifiersProcess(config.python, config.settings(), tokenizer)
            started.callback(helper.close)
            options = {"address": helper.address}
        pool = _started(config, path, options)
        started.callback(pool.close)
        served = _served(
            pool, tokenizer, config.template_variables, limits, host=config.host, token=token, helper=helper
        )
        started.pop_all()
        return served


def _served(
    pool: EnvironmentPool,
    tokenizer: "PreTrainedTokenizerBase",
    variables: Mapping[str, Any],
    limits: Limits,
    *,
    host: str = "127.0.0.1",
    token: str | None = None,
    helper: VerifiersProcess | None = None,
) -> Arena:
    """Programs and a server for them."""
    from proximo.environments.agents import AgentArena, model_server

    renderer = TurnRenderer(copy.deepcopy(tokenizer), variables=variables)  # a tokenizer is for one thread
    server = model_server(renderer, max_tokens=limits.max_tokens, host=host, token=token)
    return AgentArena(environments=pool, renderer=renderer, limits=limits, server=server, token=token, helper=helper)


def _started(config: WorkerEnvironmentConfig, path: str, options: Mapping[str, Any]) -> EnvironmentPool:
    from proximo.environments.players.processes import ProcessPlayers

    memory = None if config.memory_mib is None else config.memory_mib * 2**20
    name = next(named for _, named, _ in config.code())
    players = ProcessPlayers(path, options, memory_bytes=memory, name=name)
    return EnvironmentPool(players, name=name, workers=config.workers, timeout_seconds=config.timeout_seconds)
