"""Makes what a run plays in, from a section of its recipe or from a class that is given in Python."""

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pydantic import Field

from proximo.config.environment import (
    EnvironmentConfig,
    EpisodeLimits,
    PlayedEnvironmentConfig,
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


class PythonEnvironment(EpisodeLimits):
    """An environment that is given in Python and runs in threads of this process, and the limits of its episodes.

    `PPOTrainer(environment=MyEnvironment)` means `PythonEnvironment(make=MyEnvironment)`. A thread that hangs cannot be
    ended, and memory is not limited: a recipe runs environments in processes.
    """

    make: Callable[..., Any]
    """The class with `reset` and `step` (`Environment`), or a function that makes one; for `tools` the class itself, or
    a `functools.partial` of it."""
    max_observation_tokens: int | None = Field(512, ge=1)
    """Tokens of one observation. A longer one is cut, with a mark; None: it never is."""
    tools: bool = False
    """`make` is a class in TRL's form, whose public methods are tools, as kind `tools` of a recipe."""
    tool_style: ToolStyle | None = None
    """How the policy writes calls; None for the style of its chat template."""
    workers: int = Field(64, ge=1)
    """Episodes that are played at once."""
    timeout_seconds: float = Field(60.0, gt=0)
    """Wall-clock limit of one `reset` or `step`."""

    def arena(self, tokenizer: "PreTrainedTokenizerBase") -> Arena:
        """What engines play in."""
        renderer = _renderer(self, tokenizer, self.tool_style)
        if self.tools:
            renderer.check_tools()
        make = tools_of(self.make, renderer.tool_style, {}) if self.tools else self.make
        earns = not self.tools or gives_reward(self.make)
        pool = _threads(self, self.make, make)
        return Arena(environments=pool, renderer=renderer, limits=_limits(self), gives_reward=earns)


class PythonAgent(EpisodeLimits):
    """An agent that is given in Python and runs in threads of this process, and the limits of its trajectories.

    It finds the model by its argument `base_url`: environment variables are not set, since all threads share them.
    """

    run: Callable[..., Any]
    """Called as `run(base_url=..., row=..., seed=...)`: returns the reward, or a mapping with `reward`."""
    workers: int = Field(64, ge=1)
    """Programs that run at once."""
    timeout_seconds: float = Field(600.0, gt=0)
    """Wall-clock limit of one program."""

    def arena(self, tokenizer: "PreTrainedTokenizerBase") -> Arena:
        """What engines play in."""
        from proximo.environments.programs import FunctionAgent

        return _served(self, _threads(self, self.run, lambda: FunctionAgent(self.run)), tokenizer)


def _threads(given: PythonEnvironment | PythonAgent, named: Any, make: Callable[[], Any]) -> EnvironmentPool:
    from proximo.environments.players.threads import ThreadPlayers

    name = getattr(named, "__name__", type(named).__name__)
    return EnvironmentPool(ThreadPlayers(make), name=name, workers=given.workers, timeout_seconds=given.timeout_seconds)


def _limits(given: EpisodeLimits) -> Limits:
    return Limits(max_turns=given.max_turns, max_tokens=given.max_tokens, max_seconds=given.max_seconds)


def _renderer(
    given: PlayedEnvironmentConfig | PythonEnvironment, tokenizer: "PreTrainedTokenizerBase", style: ToolStyle | None
) -> TurnRenderer:
    return TurnRenderer(
        tokenizer,
        variables=given.template_variables,
        tool_style=style,
        max_observation_tokens=given.max_observation_tokens,
    )


def as_played(given: Any) -> Arena | PythonEnvironment | PythonAgent | None:
    """An environment with its limits, not yet started, for a class or a function; what has them, and None, as given.

    Raises ConfigError for anything else.
    """
    if given is None or isinstance(given, Arena | PythonEnvironment | PythonAgent):
        return given
    if not callable(given):
        raise ConfigError(
            "environment must be a class with reset and step, a function that makes an environment, a "
            f"PythonEnvironment or a PythonAgent, got {type(given).__name__}"
        )
    return PythonEnvironment(make=given)


def make_environments(
    config: EnvironmentConfig, tokenizer: "PreTrainedTokenizerBase", *, on_every_rank: bool, is_rewarded: bool = True
) -> Arena:
    """What the engines of a recipe play in. Environments start now, in worker processes, on the ranks that play.

    `is_rewarded`: by others than the environment. Raises ConfigError for an environment that cannot be imported or
    made, for tools whose calls in the style of the chat template would not be read, and where nothing rewards.
    """
    style = config.tool_style if isinstance(config, ToolsEnvironmentConfig) else None
    renderer = _renderer(config, tokenizer, style)
    if isinstance(config, ToolsEnvironmentConfig):
        renderer.check_tools()
    plays = on_every_rank or current().leads
    if isinstance(config, ProgramEnvironmentConfig) and plays:
        return _agents(config, tokenizer)
    path, options = config.made_by(renderer.tool_style)
    if isinstance(config, ToolsEnvironmentConfig):
        options |= {"is_rewarded": is_rewarded}
    pool = _started(config, path, options) if plays else None
    return Arena(environments=pool, renderer=renderer, limits=_limits(config))


def _agents(config: ProgramEnvironmentConfig, tokenizer: "PreTrainedTokenizerBase") -> Arena:
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
        served = _served(config, pool, tokenizer, host=config.host, token=token, helper=helper)
        started.pop_all()
        return served


def _served(
    given: EpisodeLimits,
    pool: EnvironmentPool,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    host: str = "127.0.0.1",
    token: str | None = None,
    helper: VerifiersProcess | None = None,
) -> Arena:
    """Programs and a server for them."""
    from proximo.environments.agents import AgentArena, model_server

    renderer = TurnRenderer(copy.deepcopy(tokenizer), variables=given.template_variables)  # for its own threads
    server = model_server(renderer, max_tokens=given.max_tokens, host=host, token=token)
    return AgentArena(
        environments=pool, renderer=renderer, limits=_limits(given), server=server, token=token, helper=helper
    )


def _started(config: WorkerEnvironmentConfig, path: str, options: Mapping[str, Any]) -> EnvironmentPool:
    from proximo.environments.players.processes import ProcessPlayers

    memory = None if config.memory_mib is None else config.memory_mib * 2**20
    name = next(named for _, named, _ in config.code())
    players = ProcessPlayers(path, options, memory_bytes=memory, name=name)
    return EnvironmentPool(players, name=name, workers=config.workers, timeout_seconds=config.timeout_seconds)
