"""The section `environment` of a PPO recipe: where the policy acts over several turns."""

from collections.abc import Iterator
from importlib.util import find_spec
from shutil import which
from typing import Any, ClassVar, Literal

from pydantic import Field

from proximo.config.functions import code_problem
from proximo.config.schema.base import Section
from proximo.config.schema.validation_messages import CODE
from proximo.config.service_address import TokenVariable

ENVIRONMENT = "environment"
"""Name of the rewards of an environment in scores and metrics."""
ROWS = "proximo.environments.rows:numbered_rows"
"""The rows of a run without data."""
ADAPTERS = "proximo.environments.adapters"
PROGRAMS = "proximo.environments.programs"


class EpisodeLimits(Section):
    """The limits of an episode, in a recipe and in Python."""

    max_turns: int = Field(16, ge=1)
    """Turns of the policy in an episode. One that is not over by then ends with finish `length`."""
    max_tokens: int = Field(1024, ge=2)
    """Most tokens of a call: the conversation so far, which the policy reads, and the turn that it writes. An episode
    that reaches it ends with finish `length`. `ppo.rollout.max_new_tokens` limits a single turn."""
    max_seconds: float | None = Field(None, gt=0)
    """An episode that is older begins no further turn and ends with finish `length`. Results then depend on the clock;
    null has no such limit."""
    template_variables: dict[str, Any] = Field(default_factory=dict)
    """What the chat template reads besides messages and tools, such as `enable_thinking`."""


class PlayedEnvironmentConfig(EpisodeLimits):
    """What all kinds have in common: how many episodes there are, and their limits."""

    num_rows: int = Field(1000, ge=1)
    """Number of prompts where the run has no `data`. Each begins an episode with another seed. With `data` every row
    begins one, and `reset` is given the row."""
    max_observation_tokens: int = Field(512, ge=1)
    """Tokens of one observation. A longer one is cut, with a mark, and counted."""

    def code(self) -> Iterator[tuple[str, str, str | None]]:
        """(key, what it names, why that cannot be used or None) of all code that is imported. Nothing is imported."""
        yield from ()


class WorkerEnvironmentConfig(PlayedEnvironmentConfig):
    """Kinds whose environments run in worker processes."""

    workers: int = Field(64, ge=1)
    """Episodes that are played at once, each in a process of its own. Samples do not depend on it."""
    timeout_seconds: float = Field(60.0, gt=0)
    """Wall-clock limit of one `reset` or `step`. An environment that runs past it is ended: the trajectory has no
    reward and is left out."""
    memory_mib: int | None = Field(None, ge=1)
    """Memory limit of one environment, in MiB. For environments that may leak."""

    def made_by(self, tool_style: str) -> tuple[str, dict[str, Any]]:
        """The import path of the class or function that makes it in a worker process, and its options.

        `tool_style`: how the chat template writes calls of tools.
        """
        raise NotImplementedError


class OwnEnvironmentConfig(WorkerEnvironmentConfig):
    """Kinds that are a class of the user."""

    path: str = Field(pattern=CODE)
    """`file.py:Class` or `package.module:Class`, called with `kwargs`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""

    def code(self) -> Iterator[tuple[str, str, str | None]]:
        yield "path", self.path, code_problem(self.path)


class ClassEnvironmentConfig(OwnEnvironmentConfig):
    """A Python class with `reset` and `step`."""

    kind: Literal["class"] = "class"
    """A class of yours with `reset(seed, row)` and `step(text)`. docs/environments.md."""

    def made_by(self, tool_style: str) -> tuple[str, dict[str, Any]]:  # noqa: ARG002
        return self.path, self.kwargs


class ToolsEnvironmentConfig(OwnEnvironmentConfig):
    """A class of yours in TRL's form: `reset(**row)` returns a text or None, all other public methods are tools that
    the policy may call, and `get_reward()`, if there is one, is asked after every turn."""

    kind: Literal["tools"]
    """A Python class whose public methods are tools."""
    tool_style: Literal["hermes", "qwen_coder", "llama", "mistral", "glm"] | None = None
    """How the policy writes calls; null for the style of its chat template."""

    def made_by(self, tool_style: str) -> tuple[str, dict[str, Any]]:
        options = {"path": self.path, "style": tool_style, "kwargs": self.kwargs}
        return f"{ADAPTERS}.tools:tools", options


class RegisteredEnvironmentConfig(WorkerEnvironmentConfig):
    """Kinds of a package that knows its environments by an id."""

    package: ClassVar[str]
    """The module that is imported. The extra is named after it."""
    adapter: ClassVar[str]
    handed: ClassVar[tuple[str, ...]] = ("id", "kwargs")
    """Keys that the adapter is given."""
    id: str
    """Id of the environment in its package."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further settings of the environment, which its package passes on."""

    def made_by(self, tool_style: str) -> tuple[str, dict[str, Any]]:  # noqa: ARG002
        return f"{ADAPTERS}.{self.package}:{self.adapter}", {key: getattr(self, key) for key in self.handed}

    def code(self) -> Iterator[tuple[str, str, str | None]]:
        extra = self.package.replace("_", "-")
        absent = f"its package is not installed: run pip install 'proximo[{extra}]'"
        yield "id", self.id, None if find_spec(self.package) else absent


class GymnasiumEnvironmentConfig(RegisteredEnvironmentConfig):
    """An environment registered with Gymnasium that is played in texts, or in numbers, such as FrozenLake-v1. The id of
    one of yours is `package.module:Id-v0`."""

    package: ClassVar[str] = "gymnasium"
    adapter: ClassVar[str] = "Gymnasium"
    handed: ClassVar[tuple[str, ...]] = ("id", "kwargs", "instructions")
    kind: Literal["gymnasium"]
    """An environment registered with Gymnasium."""
    instructions: str = ""
    """Text before the first observation, since most environments do not say what is to be done."""


class GemEnvironmentConfig(RegisteredEnvironmentConfig):
    """An environment of GEM, such as game:GuessTheNumber-v0-easy."""

    package: ClassVar[str] = "gem"
    adapter: ClassVar[str] = "Gem"
    kind: Literal["gem"]
    """An environment of GEM."""


class TextArenaEnvironmentConfig(RegisteredEnvironmentConfig):
    """A game of TextArena for one player, such as GuessTheNumber-v0, or for two, with an `opponent`."""

    package: ClassVar[str] = "textarena"
    adapter: ClassVar[str] = "TextArena"
    handed: ClassVar[tuple[str, ...]] = ("id", "kwargs", "opponent")
    kind: Literal["textarena"]
    """A game of TextArena."""
    opponent: str | None = None
    """Import path of a function from observation to action, `package.module:function` or `file.py:function`, that
    plays against the policy. The seed of an episode says who begins."""

    def code(self) -> Iterator[tuple[str, str, str | None]]:
        yield from super().code()
        if self.opponent is not None:
            yield "opponent", self.opponent, code_problem(self.opponent)


class ReasoningGymEnvironmentConfig(RegisteredEnvironmentConfig):
    """A generator of reasoning-gym, such as basic_arithmetic: one question and one answer, which is the text between
    `<answer>` and `</answer>`, or else the whole turn."""

    package: ClassVar[str] = "reasoning_gym"
    adapter: ClassVar[str] = "ReasoningGym"
    kind: Literal["reasoning_gym"]
    """A generator of reasoning-gym."""


class SkyRLGymEnvironmentConfig(RegisteredEnvironmentConfig):
    """An environment of skyrl-gym, such as gsm8k. Needs `data`: each row has its `prompt` and what else it reads."""

    package: ClassVar[str] = "skyrl_gym"
    adapter: ClassVar[str] = "SkyRLGym"
    kind: Literal["skyrl_gym"]
    """An environment of skyrl-gym."""


class ProgramEnvironmentConfig(WorkerEnvironmentConfig):
    """Kinds that own their loop, and ask the policy over HTTP as they would ask OpenAI or vLLM."""

    kind: str
    """Which of them: `agent` or `verifiers`."""
    timeout_seconds: float = Field(600.0, gt=0)
    """Wall-clock limit of one program. One that runs past it is ended: the trajectory has no reward and is left out."""
    host: str = "127.0.0.1"
    """Address of this machine that the policy is served at, on a free port. One that other machines reach needs
    `token_env`."""
    token_env: TokenVariable | None = None
    """Environment variable that holds the token which clients must know, for an address that other machines reach.
    Each trajectory has a secret address besides."""

    def conflicts(self) -> Iterator[str]:
        from proximo.http_client import is_loopback  # takes a moment

        if self.max_observation_tokens != PlayedEnvironmentConfig().max_observation_tokens:  # a saved one has every key
            yield (
                "max_observation_tokens cuts what environments say, but programs write their own messages: remove it"
            )
        if self.token_env is None and not is_loopback(self.host):
            yield (
                f"host {self.host} can be reached from other machines: name with token_env the environment variable "
                "that has the token which clients must know"
            )
        if self.host in ("0.0.0.0", "::"):
            yield f"host {self.host} is no address to call: give the one by which agents reach this machine"


class AgentEnvironmentConfig(ProgramEnvironmentConfig):
    """A program that only wants a `base_url`."""

    kind: Literal["agent"]
    """A program of yours that asks the policy over HTTP and returns its reward: a function at `path`, or a `command`.
    docs/environments.md."""
    path: str | None = Field(None, pattern=CODE)
    """`file.py:function` or `package.module:function`, called as `run(base_url=..., row=..., seed=...)`. It returns a
    number, or a mapping with `reward`, numbers for metrics, and `truncated` if it was cut."""
    command: tuple[str, ...] = ()
    """Program and arguments. It gets `BASE_URL` in its environment and `{"row": ..., "seed": ...}` as its input, and
    prints its reward as the last line."""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if (self.path is None) == (not self.command):
            yield "an agent is either a function, at path, or a command: give one of them"

    def made_by(self, tool_style: str) -> tuple[str, dict[str, Any]]:  # noqa: ARG002
        if self.path is not None:
            return f"{PROGRAMS}:function_agent", {"path": self.path}
        return f"{PROGRAMS}:CommandAgent", {"command": list(self.command)}

    def code(self) -> Iterator[tuple[str, str, str | None]]:
        if self.path is not None:
            yield "path", self.path, code_problem(self.path)
        else:
            program = self.command[0]
            yield "command", program, None if which(program) else f"there is no program {program}"
        yield "kind", self.kind, _serving_problem()


class VerifiersEnvironmentConfig(ProgramEnvironmentConfig):
    """An environment of verifiers."""

    kind: Literal["verifiers"]
    """An environment of verifiers (v1), which runs in a Python environment of its own."""
    python: str
    """The interpreter of the environment in which verifiers and the taskset are installed."""
    env: dict[str, Any]
    """The section `env` of verifiers' own configuration: `taskset` with its `id`, and the agents. The first `num_rows`
    tasks are the rows of the run; one with fewer tasks is refused."""

    def made_by(self, tool_style: str) -> tuple[str, dict[str, Any]]:  # noqa: ARG002
        return f"{PROGRAMS}:VerifiersAgent", {}

    def settings(self) -> dict[str, Any]:
        """What the process of verifiers is told."""
        return {"env": self.env, "num_tasks": self.num_rows, "template_variables": self.template_variables}

    def code(self) -> Iterator[tuple[str, str, str | None]]:
        yield "python", self.python, None if which(self.python) else f"there is no interpreter {self.python}"
        yield "kind", self.kind, _serving_problem()


EnvironmentConfig = (
    ClassEnvironmentConfig
    | AgentEnvironmentConfig
    | VerifiersEnvironmentConfig
    | ToolsEnvironmentConfig
    | GymnasiumEnvironmentConfig
    | GemEnvironmentConfig
    | TextArenaEnvironmentConfig
    | ReasoningGymEnvironmentConfig
    | SkyRLGymEnvironmentConfig
)
"""Every kind of environment."""


def _serving_problem() -> str | None:
    """Why the policy cannot be served here; None if it can."""
    is_there = find_spec("starlette") and find_spec("uvicorn")
    return None if is_there else "it needs packages: run pip install 'proximo[serve]'"


def with_rows(values: Any) -> Any:
    """A recipe as it was given; one with an environment gets rows if it has no data, and no further reward."""
    environment = values.get("environment") if isinstance(values, dict) else None
    data = values.get("data", {}) if isinstance(values, dict) else None
    if environment is None or not isinstance(environment, dict | PlayedEnvironmentConfig):
        return values
    given = environment if isinstance(environment, dict) else environment.model_dump()
    if isinstance(data, dict) and not data.get("sources") and given.get("kind") != "skyrl_gym":
        num_rows = given.get("num_rows", PlayedEnvironmentConfig.model_fields["num_rows"].default)
        data = data | {"sources": [{"function": ROWS, "kwargs": {"num_rows": num_rows}}]}
    return {"reward": (), **values, "data": data, "environment": {"kind": "class"} | given}
