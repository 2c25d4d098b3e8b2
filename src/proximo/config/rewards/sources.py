"""Config sections of model, function and custom verifier rewards, and the base of verifier rewards."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from proximo.config.run import Device
from proximo.config.schema.base import Section
from proximo.metrics.definitions import COMPONENT


class VerifierRewardConfig(Section):
    """What all sources share whose grades come from worker processes."""

    implementation: ClassVar[str]
    """`package.module:Class` of the verifier, which a worker makes with `verifier_options`."""

    kind: str
    """What tells the sources of a recipe apart."""
    name: str
    """Name of this component in the metrics."""
    weight: float = 1.0
    """Weight of this source in the sum."""
    workers: int | None = Field(None, ge=1)
    """Worker processes of this source; null for one per core."""
    answer_seconds: float = Field(10.0, gt=0)
    """Wall-clock limit of one answer. A worker that exceeds it is killed and the answer is tried once more alone; then
    it is the answer's fault."""
    step_seconds: float = Field(600.0, gt=0)
    """Wall-clock limit of all answers of a step. What was not graded by then has no score."""
    attempts: int = Field(3, ge=1)
    """How often an answer is tried whose worker died or whose verifier failed, before it is left without a score."""
    worker_memory_mib: int | None = Field(4096, ge=128)
    """Address space of a worker, and of each process that it starts; null for no limit. What needs more fails."""

    def verifier_path(self) -> str:
        """`package.module:Class` of the verifier."""
        return self.implementation

    def caveats(self) -> tuple[str, ...]:
        """Warnings to show when the source is built, for example about missing isolation on this machine."""
        return ()

    def verifier_options(self) -> dict[str, Any]:
        """Keyword arguments of the verifier: the fields that only this kind of source has, as plain values."""
        shared = {*VerifierRewardConfig.model_fields, "kind", "name"}
        return self.model_dump(mode="json", exclude=shared)


class ModelRewardConfig(Section):
    """Scores from a reward model."""

    kind: Literal["model"]
    """A one-label sequence classifier."""
    name: str = Field("reward_model", pattern=f"^{COMPONENT}$")
    """Name of this component in the metrics."""
    path: str
    """A folder or Hub name; in a pipeline `@reward`."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    tokenizer: str | None = None
    """Its tokenizer, if none is beside the model, or the same with another chat template: prompts and responses are
    rendered again for it."""
    dense: Literal["none", "deltas", "absolute"] = "none"
    """`none`: the score is on the last token. `deltas`: each token gets the change of the score of the response so far;
    they sum to the same score. `absolute`: each token gets the score after it, and their sum is the score, so long
    responses get more. docs/rewards.md, "Rewards of single tokens"."""
    share_base: bool = False
    """`path` is a folder with an adapter that was trained on the policy's base; it uses the policy's copy of those
    weights. Otherwise a reward model has its own weights."""
    device: Device | None = None
    """Where this model is; null means `run.device`."""
    weight: float = 1.0
    """Weight of this source in the sum."""

    @model_validator(mode="after")
    def _adapter_in_a_folder(self) -> Self:
        if self.share_base and self.revision is not None:
            raise ValueError("share_base reads an adapter from a folder, which has no revision: remove revision")
        return self


class FunctionRewardConfig(Section):
    """Scores from a Python function."""

    kind: Literal["function"]
    """A function named by its import path."""
    name: str = Field("function", pattern=f"^{COMPONENT}$")
    """Name of this component in the metrics."""
    function: str
    """`package.module:function`, called with lists of prompts, responses and metadata. docs/rewards.md."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments."""
    timeout_seconds: float = Field(600.0, gt=0)
    """Stop the run with an error if the function has not returned for a batch after this time."""
    process: bool = False
    """Run the function in a separate process. If it hangs, raises or crashes there, it is ended and tried again; then
    the batch has no scores (`ppo.guards.max_unscored_fraction`)."""
    weight: float = 1.0
    """Weight of this source in the sum."""


class CustomVerifierRewardConfig(VerifierRewardConfig):
    """Scores from your own verifier, in worker processes."""

    kind: Literal["verifier"]
    """A class named by its import path. docs/rewards.md, "A verifier of your own"."""
    name: str = Field("verifier", pattern=f"^{COMPONENT}$")
    """Name of this component in the metrics."""
    verifier_class: str
    """`package.module:Class`, with a method `grade`; made in each worker."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""

    def verifier_path(self) -> str:
        return self.verifier_class

    def verifier_options(self) -> dict[str, Any]:
        return dict(self.kwargs)
