"""The section `environment` of a PPO recipe: where the policy acts over several turns."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

from pydantic import Field

from proximo.config.functions import code_problem
from proximo.config.schema.base import Section

ENVIRONMENT = "environment"
"""Name of the rewards of an environment in scores and metrics."""
ROWS = "proximo.environments.rows:numbered_rows"
"""The rows of a run without data."""
ADAPTERS = "proximo.environments.adapters"


class PlayedEnvironmentConfig(Section):
    """What all kinds have in common: how many episodes there are, and their limits."""

    num_rows: int = Field(1000, ge=1)
    """Number of prompts where the run has no `data`. Each begins an episode with another seed. With `data` every row
    begins one, and `reset` is given the row."""
    max_turns: int = Field(16, ge=1)
    """Turns of the policy in an episode. One that is not over by then ends with finish `length`."""
    max_tokens: int = Field(1024, ge=2)
    """Tokens that the policy reads and writes in one call: the whole conversation. An episode that reaches it ends with
    finish `length`. `ppo.rollout.max_new_tokens` limits a single turn."""
    max_observation_tokens: int = Field(512, ge=1)
    """Tokens of one observation. A longer one is cut, with a mark, and counted."""
    max_seconds: float | None = Field(None, gt=0)
    """An episode that is older begins no further turn and ends with finish `length`. Results then depend on the clock;
    null has no such limit."""
    template_variables: dict[str, Any] = Field(default_factory=dict)
    """What the chat template reads besides messages and tools, such as `enable_thinking`."""

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

    path: str = Field(pattern=r".+:[A-Za-z_]\w*")
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
        options = {"path": self.path, "style": self.tool_style or tool_style, "kwargs": self.kwargs}
        return f"{ADAPTERS}.tools:tools", options


class RegisteredEnvironmentConfig(WorkerEnvironmentConfig):
    """Kinds of a package that knows its environments by an id."""

    package: ClassVar[str]
    """The module that is imported. The extra is named after it."""
    adapter: ClassVar[str]
    id: str
    """Id of the environment in its package."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further settings of the environment, which its package passes on."""

    def made_by(self, tool_style: str) -> tuple[str, dict[str, Any]]:  # noqa: ARG002
        return f"{ADAPTERS}.{self.package}:{self.adapter}", {"id": self.id, "kwargs": self.kwargs}

    def code(self) -> Iterator[tuple[str, str, str | None]]:
        extra = self.package.replace("_", "-")
        absent = f"its package is not installed: run pip install 'proximo[{extra}]'"
        yield "id", self.id, None if find_spec(self.package) else absent


class GymnasiumEnvironmentConfig(RegisteredEnvironmentConfig):
    """An environment registered with Gymnasium that is played in texts, or in numbers, such as FrozenLake-v1. The id of
    one of yours is `package.module:Id-v0`."""

    package: ClassVar[str] = "gymnasium"
    adapter: ClassVar[str] = "Gymnasium"
    kind: Literal["gymnasium"]
    """An environment registered with Gymnasium."""
    instructions: str = ""
    """Text before the first observation, since most environments do not say what is to be done."""

    def made_by(self, tool_style: str) -> tuple[str, dict[str, Any]]:
        path, options = super().made_by(tool_style)
        return path, options | {"instructions": self.instructions}


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
    kind: Literal["textarena"]
    """A game of TextArena."""
    opponent: str | None = None
    """Import path of a function from observation to action, `package.module:function` or `file.py:function`, that
    plays against the policy. The seed of an episode says who begins."""

    def made_by(self, tool_style: str) -> tuple[str, dict[str, Any]]:
        path, options = super().made_by(tool_style)
        return path, options | {"opponent": self.opponent}

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


EnvironmentConfig = (
    ClassEnvironmentConfig
    | ToolsEnvironmentConfig
    | GymnasiumEnvironmentConfig
    | GemEnvironmentConfig
    | TextArenaEnvironmentConfig
    | ReasoningGymEnvironmentConfig
    | SkyRLGymEnvironmentConfig
)
"""Every kind of environment."""


def with_rows(values: Any) -> Any:
    """A recipe as it was given; one with an environment gets rows if it has no data, and no further reward."""
    environment = values.get("environment") if isinstance(values, dict) else None
    data = values.get("data", {}) if isinstance(values, dict) else None
    if environment is None or not isinstance(environment, dict | PlayedEnvironmentConfig):
        return values
    given = environment if isinstance(environment, dict) else environment.model_dump()
    if isinstance(data, dict) and "sources" not in data and given.get("kind") != "skyrl_gym":
        num_rows = given.get("num_rows", PlayedEnvironmentConfig.model_fields["num_rows"].default)
        data = data | {"sources": [{"function": ROWS, "kwargs": {"num_rows": num_rows}}]}
    return {"reward": (), **values, "data": data, "environment": {"kind": "class"} | given}
