"""Where a run's numbers go besides its folder: experiment trackers, and a sink of the user's own. Not the sending."""

from typing import Annotated, Any, Literal

from pydantic import Field

from proximo.config.schema.base import Section


class WandbSinkConfig(Section):
    """Weights & Biases (`pip install 'proximo[wandb]'`)."""

    kind: Literal["wandb"]
    """Weights & Biases."""
    project: str = "proximo"
    """The project of the run."""
    entity: str | None = None
    """The user or team; null takes the default of whoever is logged in."""
    name: str | None = None
    """The run's name; null takes the run folder as the recipe writes it."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes below the run folder, in `trackers/wandb`, to be sent later with `wandb sync`."""
    samples: bool = False
    """Send the rows of samples.jsonl too, prompts and responses among them, as a table for each step that has some."""

    @property
    def label(self) -> str:
        return self.kind


class MLflowSinkConfig(Section):
    """MLflow (`pip install 'proximo[mlflow]'`)."""

    kind: Literal["mlflow"]
    """MLflow."""
    experiment: str = "proximo"
    """The experiment of the run; made where there is none."""
    tracking_uri: str | None = None
    """The server or database; null leaves it to MLflow (its environment variable, or its default)."""
    samples: bool = False
    """Send the rows of samples.jsonl too, prompts and responses among them, as a file for each step that has some."""
    name: str | None = None
    """The run's name; null takes the run folder as the recipe writes it."""

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
    """The Space of the Hugging Face Hub that shows the project; null keeps it on this machine."""
    name: str | None = None
    """The run's name, a part of its id follows; null takes the run folder as the recipe writes it."""

    @property
    def label(self) -> str:
        return self.kind


class FunctionSinkConfig(Section):
    """A sink of your own, for any other tracker."""

    kind: Literal["function"]
    """A function that makes the sink."""
    function: str
    """`package.module:function`, called as `function(run, **kwargs)` with a `TrackedRun`; it returns a `Sink`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the function."""
    name: str | None = None
    """The run's name; null takes the run folder as the recipe writes it."""

    @property
    def label(self) -> str:
        return self.function


SinkConfig = Annotated[
    WandbSinkConfig | MLflowSinkConfig | TrackioSinkConfig | FunctionSinkConfig, Field(discriminator="kind")
]
