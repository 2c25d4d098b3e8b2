"""Config sections of what a run sends elsewhere: metrics to trackers and sinks of your own, its model to the Hub."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from proximo.config.schema.base import Section
from proximo.hub import is_hub_name


class WandbSinkConfig(Section):
    """Weights & Biases, by the extra wandb. Where it sends to, and as whom, its own environment variables say.
    docs/trackers.md.
    """

    kind: Literal["wandb"]
    """A run of Weights & Biases."""
    project: str = "proximo"
    """The project of the run. For teams, whose runs share a tracker."""
    name: str | None = None
    """The run's name; null uses the run folder as written in the recipe."""
    samples: bool = False
    """Also send the rows of samples.jsonl, with prompts and responses. For teams that read responses in their tracker;
    off because texts may be more confidential than metrics."""

    @property
    def label(self) -> str:
        return self.kind


class FunctionSinkConfig(Section):
    """Your own sink, for any other tracker."""

    kind: Literal["function"]
    """A function that makes the sink."""
    function: str
    """`package.module:function`, called as `function(run, **kwargs)` with a `TrackedRun`; it returns a `Sink`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Additional keyword arguments of the function."""
    name: str | None = None
    """The run's name; null uses the run folder as written in the recipe."""

    @property
    def label(self) -> str:
        return self.function


SinkConfig = Annotated[WandbSinkConfig | FunctionSinkConfig, Field(discriminator="kind")]


class PushConfig(Section):
    """Upload the trained model to the Hugging Face Hub. The token is that of `hf auth login`, or HF_TOKEN.

    A model that is created is visible to you alone; one that exists stays as it is.
    """

    name: str
    """The model's name there, such as me/my-model; created if it does not exist."""
    when: Literal["end", "save", "best"] = "end"
    """`end`: the last checkpoint of a finished run. `save`: also every other one. `best`: each that is the best so far.
    docs/checkpoint.md."""

    @field_validator("name")
    @classmethod
    def _a_name(cls, value: str) -> str:
        if not is_hub_name(value):
            raise ValueError(f"must be a name on the Hub, such as me/my-model, got {value!r}")
        return value
