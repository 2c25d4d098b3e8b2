"""The section `environment` of a PPO recipe: where the policy acts over several turns."""

from typing import Any, Literal

from pydantic import Field

from proximo.config.schema.base import Section

ENVIRONMENT = "environment"
"""Name of the rewards of an environment in scores and metrics."""
ROWS = "proximo.environments.rows:numbered_rows"
"""The rows of a run without data."""


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


class WorkerEnvironmentConfig(PlayedEnvironmentConfig):
    """Kinds whose environments run in worker processes."""

    workers: int = Field(64, ge=1)
    """Episodes that are played at once, each in a process of its own. Samples do not depend on it."""
    timeout_seconds: float = Field(60.0, gt=0)
    """Wall-clock limit of one `reset` or `step`. An environment that runs past it is ended: the trajectory has no
    reward and is left out."""
    memory_mib: int | None = Field(None, ge=1)
    """Memory limit of one environment, in MiB. For environments that may leak."""


class ClassEnvironmentConfig(WorkerEnvironmentConfig):
    """A Python class with `reset` and `step`."""

    kind: Literal["class"] = "class"
    """A class of yours with `reset(seed, row)` and `step(text)`. docs/environments.md."""
    path: str = Field(pattern=r".+:[A-Za-z_]\w*")
    """`file.py:Class` or `package.module:Class`, called with `kwargs`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""


EnvironmentConfig = ClassEnvironmentConfig
"""Every kind of environment."""


def with_rows(values: Any) -> Any:
    """A recipe as it was given; one with an environment gets rows if it has no data, and no further reward."""
    environment = values.get("environment") if isinstance(values, dict) else None
    data = values.get("data", {}) if isinstance(values, dict) else None
    if environment is None or not isinstance(environment, dict | PlayedEnvironmentConfig):
        return values
    given = environment if isinstance(environment, dict) else environment.model_dump()
    if isinstance(data, dict) and "sources" not in data:
        num_rows = given.get("num_rows", PlayedEnvironmentConfig.model_fields["num_rows"].default)
        data = data | {"sources": [{"function": ROWS, "kwargs": {"num_rows": num_rows}}]}
    return {"reward": (), **values, "data": data, "environment": {"kind": "class"} | given}
