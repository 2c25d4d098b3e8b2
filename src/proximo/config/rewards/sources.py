"""Sections of reward sources: models, functions, services. A section names the variable of a token, never the token."""

import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, model_validator

from proximo.config.run import Device
from proximo.config.schema.base import Section
from proximo.config.service_address import ServiceAddress, TokenVariable
from proximo.metrics.definitions import COMPONENT

NAMES = {"model": "reward_model", "think_answer": "form"}
"""Kind of a source -> its name, where that is not the kind."""


class SourceOfScoresConfig(Section):
    """What all sources of scores have in common."""

    kind: str
    """The kind of source."""
    name: str = Field(
        default_factory=lambda given: NAMES.get(given.get("kind", ""), given.get("kind", "")), pattern=f"^{COMPONENT}$"
    )
    """Name of this component in the metrics: by default its kind, or `reward_model`, `form`, or that of the
    function."""
    weight: float = 1.0
    """Weight of this source in the sum."""


class ModelRewardConfig(SourceOfScoresConfig):
    """Scores by a reward model."""

    kind: Literal["model"]
    """A sequence classifier with one label."""
    path: str
    """A folder or Hub name; in a pipeline `@reward` or `@prm`."""
    revision: str | None = None
    """Branch, tag or commit on the Hub, for a run that must stay the same when the model there changes."""
    tokenizer: str | None = None
    """Tokenizer of the reward model if none lies beside it, or one with another chat template. Prompts and responses
    are rendered again with it."""
    dense: Literal["none", "deltas", "absolute"] = "none"
    """`none`: the last token gets the score. `deltas`: each token gets the change that it makes to the score of the
    response so far; the changes sum to the same score. `absolute`: each token gets the score of the response up to it,
    and the sum is the score, which grows with the length. docs/rewards.md, "Rewards of single tokens"."""
    share_base: bool = False
    """`path` is a folder with an adapter that was trained on the policy's base model, and runs on the policy's copy of
    those weights, which saves the memory of a second model. Otherwise the reward model has its own weights."""
    device: Device | None = None
    """Device of this model; null means `run.device`."""

    def conflicts(self) -> Iterator[str]:
        if self.share_base and self.revision is not None:
            yield "share_base reads an adapter from a folder, and a folder has no revision: remove revision"


class PRMRewardConfig(ModelRewardConfig):
    """Scores by a process reward model, which judges the steps of a response. docs/process-rewards.md."""

    kind: Literal["prm"]  # ty: ignore[incompatible-attribute-override]
    """A sequence classifier with one label that `proximo prm` trained."""
    step_separator: str | None = Field(None, min_length=1)
    """Text that separates the steps of a response; null for the one that the model was trained with, which models from
    elsewhere may not name."""
    aggregate: Literal["min", "product", "last", "mean"] = "min"
    """How the probabilities of the steps become the score of the response: their smallest, their product, that of the
    last step, or their mean."""
    dense: Literal["none", "deltas", "absolute"] = "none"
    """`none`: the last token gets the score. `deltas`: the last token of each step gets the change that the step makes
    to the aggregate; the changes sum to the same score. `absolute`: the last token of each step gets its probability,
    and the sum is the score, which grows with the number of steps."""


class FunctionRewardConfig(SourceOfScoresConfig):
    """Scores by a Python function."""

    kind: Literal["function"]
    """A function, named by its import path."""
    function: str
    """`package.module:function`, called with what its parameters name: prompts, responses, completions, columns of the
    rows; or the import path of an object with `name` and a method `score`, a source. docs/rewards.md."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the function."""
    timeout_seconds: float = Field(600.0, gt=0)
    """Time limit of the function for one batch; the run stops when it is exceeded. A function that asks a slow service
    may need more."""

    @model_validator(mode="before")
    @classmethod
    def _named_after_the_function(cls, values: Any) -> Any:
        own = str(values.get("function")).partition(":")[2] if isinstance(values, dict) else ""
        return {"name": own} | values if re.fullmatch(COMPONENT, own) else values


class RemoteRewardConfig(SourceOfScoresConfig):
    """Scores from a reward service, such as `proximo serve-reward` on another machine. docs/remote-rewards.md."""

    kind: Literal["remote"]
    """A reward service over HTTP."""
    url: ServiceAddress
    """Address of the service, such as http://verifiers:8321. Use https on a network that you do not trust."""
    token_env: TokenVariable | None = None
    """Environment variable that holds the token of the service; null for a service without one."""
    responses_per_request: int = Field(16, ge=1)
    """Responses in one request. More suit a quick verifier, fewer a slow one."""
    max_concurrent_requests: int = Field(4, ge=1)
    """Largest number of requests in flight; more keep a service with many workers busy."""
    request_seconds: float = Field(120.0, gt=0)
    """Wall-clock limit of one request, after which it is sent again. Slow verifiers need more."""
    step_seconds: float = Field(600.0, gt=0)
    """Wall-clock limit of all responses of a step. A response without a result by then has no score."""

    def conflicts(self) -> Iterator[str]:
        if self.request_seconds > self.step_seconds:
            yield f"request_seconds ({self.request_seconds:g}) must not exceed step_seconds ({self.step_seconds:g})"
