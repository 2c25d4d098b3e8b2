"""Sections of reward sources: models, functions, custom verifiers, and the base of all verifier sections."""

import re
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from proximo.config.run import Device
from proximo.config.schema.base import Section
from proximo.metrics.definitions import COMPONENT

WORKER_MEMORY_MIB = 4096


class VerifierRewardConfig(Section):
    """The keys that all sources with a verifier in worker processes share."""

    implementation: ClassVar[str]
    """`package.module:Class` of the verifier, which each worker constructs with `verifier_options`."""

    kind: str
    """The kind of source."""
    name: str
    """Name of this component in the metrics."""
    weight: float = 1.0
    """Weight of this source in the sum."""
    workers: int | None = Field(None, ge=1)
    """Worker processes of this source; null for one per core."""
    answer_seconds: float = Field(10.0, gt=0)
    """Wall-clock limit of one answer. A worker that exceeds it is killed, and the answer is tried once more in a worker
    of its own. If that times out too, the answer is at fault and gets the verifier's score for a time-out."""
    step_seconds: float = Field(600.0, gt=0)
    """Wall-clock limit of all answers of a step. An answer that is not graded by then has no score."""

    @property
    def memory_of_a_worker_mib(self) -> int | None:
        """Address space of a worker, and of each process that it starts; None for no limit."""
        return WORKER_MEMORY_MIB

    def verifier_path(self) -> str:
        """The import path of the verifier, `package.module:Class`."""
        return self.implementation

    def caveats(self) -> tuple[str, ...]:
        """Warnings for the user about what the source lacks on this machine."""
        return ()

    def verifier_options(self) -> dict[str, Any]:
        """The keyword arguments of the verifier as plain values: the keys that are specific to this kind."""
        shared = {*VerifierRewardConfig.model_fields, "kind", "name"}
        return self.model_dump(mode="json", exclude=shared)


class AnswerScores(Section):
    """The scores of a verifier that tells correct answers from incorrect ones."""

    correct: float = 1.0
    """Score of a correct answer."""
    incorrect: float = 0.0
    """Score of an incorrect answer. A small positive one rewards the form of an answer."""
    no_answer: float = 0.0
    """Score of a response without an answer; for programs, of one without a program. A lower one than `incorrect`
    teaches the form first."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not max(self.incorrect, self.no_answer) < self.correct:
            raise ValueError(
                f"correct ({self.correct:g}) must be above incorrect ({self.incorrect:g}) and no_answer "
                f"({self.no_answer:g})"
            )
        return self


class AnswerRewardConfig(VerifierRewardConfig):
    """Base of verifiers that tell correct answers from incorrect ones."""

    scores: AnswerScores = Field(default_factory=AnswerScores)
    """What correct, incorrect and missing answers score."""

    def verifier_options(self) -> dict[str, Any]:
        options = super().verifier_options()
        return options | {f"{name}_score": score for name, score in options.pop("scores").items()}


class ModelRewardConfig(Section):
    """Scores by a reward model."""

    kind: Literal["model"]
    """A sequence classifier with one label."""
    name: str = Field("reward_model", pattern=f"^{COMPONENT}$")
    """Name of this component in the metrics."""
    path: str
    """A folder or Hub name; in a pipeline `@reward` or `@prm`."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    tokenizer: str | None = None
    """Tokenizer of the reward model if none lies beside it, or one with another chat template. Prompts and responses
    are rendered again with it."""
    dense: Literal["none", "deltas", "absolute"] = "none"
    """`none`: the last token gets the score. `deltas`: each token gets the change that it makes to the score of the
    response so far; the changes sum to the same score. `absolute`: each token gets the score of the response up to it,
    and the sum is the score, which grows with the length. docs/rewards.md, "Rewards of single tokens"."""
    share_base: bool = False
    """`path` is a folder with an adapter that was trained on the policy's base model, and runs on the policy's copy of
    those weights. Otherwise the reward model has its own weights."""
    device: Device | None = None
    """Device of this model; null means `run.device`."""
    weight: float = 1.0
    """Weight of this source in the sum."""

    @model_validator(mode="after")
    def _adapter_in_a_folder(self) -> Self:
        if self.share_base and self.revision is not None:
            raise ValueError("share_base reads an adapter from a folder, and a folder has no revision: remove revision")
        return self


class PRMRewardConfig(ModelRewardConfig):
    """Scores by a process reward model, which judges the steps of a response. docs/process-rewards.md."""

    kind: Literal["prm"]  # ty: ignore[incompatible-attribute-override]
    """A sequence classifier with one label that `proximo prm` trained."""
    name: str = Field("prm", pattern=f"^{COMPONENT}$")
    """Name of this component in the metrics."""
    step_separator: str | None = Field(None, min_length=1)
    """Text that separates the steps of a response; null for the one that the model was trained with."""
    aggregate: Literal["min", "product", "last", "mean"] = "min"
    """How the probabilities of the steps become the score of the response: their smallest, their product, that of the
    last step, or their mean."""
    dense: Literal["none", "deltas", "absolute"] = "none"
    """`none`: the last token gets the score. `deltas`: the last token of each step gets the change that the step makes
    to the aggregate; the changes sum to the same score. `absolute`: the last token of each step gets its probability,
    and the sum is the score, which grows with the number of steps."""


class FunctionRewardConfig(Section):
    """Scores by a Python function."""

    kind: Literal["function"]
    """A function, named by its import path."""
    name: str = Field("function", pattern=f"^{COMPONENT}$")
    """Name of this component in the metrics; the name of the function where you give none."""
    function: str
    """`package.module:function`, called with what its parameters name: prompts, responses, completions, columns of the
    rows; or the import path of an object with `name` and a method `score`, a source. docs/rewards.md."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the function."""
    timeout_seconds: float = Field(600.0, gt=0)
    """Time limit of the function for one batch; the run stops when it is exceeded."""
    process: bool = False
    """Run the function in its own process. A call that hangs, raises or crashes there is tried again; if it keeps
    failing, the batch has no scores (`ppo.guards.max_unscored_fraction`)."""
    weight: float = 1.0
    """Weight of this source in the sum."""

    @model_validator(mode="before")
    @classmethod
    def _named_after_the_function(cls, values: Any) -> Any:
        own = str(values.get("function")).partition(":")[2] if isinstance(values, dict) else ""
        return {"name": own} | values if re.fullmatch(COMPONENT, own) else values


class CustomVerifierRewardConfig(VerifierRewardConfig):
    """Scores by your own verifier class, in worker processes."""

    kind: Literal["verifier"]
    """A verifier class, named by its import path. docs/rewards.md, "A verifier of your own"."""
    name: str = Field("verifier", pattern=f"^{COMPONENT}$")
    """Name of this component in the metrics."""
    verifier_class: str
    """`package.module:Class` with a method `grade`; each worker makes one."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    worker_memory_mib: int | None = Field(WORKER_MEMORY_MIB, ge=128)
    """Address space in MiB of a worker, and of each process that it starts; null for no limit, as a verifier may need
    that loads a model."""

    @property
    def memory_of_a_worker_mib(self) -> int | None:
        return self.worker_memory_mib

    def verifier_path(self) -> str:
        return self.verifier_class

    def verifier_options(self) -> dict[str, Any]:
        return dict(self.kwargs)
