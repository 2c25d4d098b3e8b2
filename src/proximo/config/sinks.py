"""Config sections of what a run sends elsewhere: metrics to trackers and sinks of your own, its model to the Hub."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from proximo.config.schema.base import Section
from proximo.hub import is_hub_name


class WandbSinkConfig(Section):
    """Weights & Biases (`pip install 'proximo[wandb]'`)."""

    kind: Literal["wandb"]
    """Weights & Biases."""
    project: str = "proximo"
    """The project of the run."""
    entity: str | None = None
    """The user or team; null uses the default of your login."""
    name: str | None = None
    """The run's name; null uses the run folder as written in the recipe."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to `trackers/wandb` in the run folder, for a later `wandb sync`."""
    samples: bool = False
    """Also send the rows of samples.jsonl, with prompts and responses, as a table per step, and report.html at the
    end."""

    @property
    def label(self) -> str:
        return self.kind


class MLflowSinkConfig(Section):
    """MLflow (`pip install 'proximo[mlflow]'`)."""

    kind: Literal["mlflow"]
    """MLflow."""
    experiment: str = "proximo"
    """The experiment of the run; created if it does not exist."""
    tracking_uri: str | None = None
    """The server or database; null uses MLflow's environment variable or default."""
    samples: bool = False
    """Also send the rows of samples.jsonl, with prompts and responses: held-out ones as tables, those of training as a
    file per step; and report.html at the end."""
    name: str | None = None
    """The run's name; null uses the run folder as written in the recipe."""

    @property
    def label(self) -> str:
        return self.kind


class TrackioSinkConfig(Section):
    """Trackio (`pip install 'proximo[trackio]'`)."""

    kind: Literal["trackio"]
    """Trackio."""
    project: str = "proximo"
    """The project of the run."""
    space_id: str | None = None
    """The Space on the Hugging Face Hub that shows the project; null stores it locally."""
    samples: bool = False
    """Also send the rows of samples.jsonl, with prompts and responses, as a table per step, and report.html at the
    end."""
    name: str | None = None
    """The run's name, followed by a part of its id; null uses the run folder as written in the recipe."""

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


SinkConfig = Annotated[
    WandbSinkConfig | MLflowSinkConfig | TrackioSinkConfig | FunctionSinkConfig, Field(discriminator="kind")
]


class PushConfig(Section):
    """Upload the trained model to the Hugging Face Hub. The token is that of `hf auth login`, or HF_TOKEN."""

    name: str
    """The model's name there, such as me/my-model; created if it does not exist."""
    when: Literal["end", "save", "best"] = "end"
    """`end`: the last checkpoint of a finished run. `save`: also every other one. `best`: each that is the best so far.
    docs/checkpoint.md."""
    private: bool = True
    """Whether a model that is created is visible to you alone; one that exists stays as it is."""
    wait_minutes: float = Field(30.0, ge=0)
    """How long the end of the run waits for the last upload, which is then given up. `--resume=auto` tries it again."""

    @field_validator("name")
    @classmethod
    def _a_name(cls, value: str) -> str:
        if not is_hub_name(value):
            raise ValueError(f"must be a name on the Hub, such as me/my-model, got {value!r}")
        return value
