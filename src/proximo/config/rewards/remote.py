"""The section of a reward service on another machine. It names the variable that holds the token, never the token."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from proximo.config.schema.base import Section
from proximo.config.service_address import address_problem, token_variable
from proximo.metrics.definitions import COMPONENT


class RemoteRewardConfig(Section):
    """Scores from a reward service, such as `proximo serve-reward` on another machine. docs/remote-rewards.md."""

    kind: Literal["remote"]
    """A reward service over HTTP."""
    name: str = Field("remote", pattern=f"^{COMPONENT}$")
    """Name of this component in the metrics."""
    url: str
    """Address of the service, such as http://verifiers:8321. Use https on a network that you do not trust."""
    token_env: Annotated[str, AfterValidator(token_variable)] | None = None
    """Environment variable that holds the token of the service; null for a service without one."""
    responses_per_request: int = Field(16, ge=1)
    """Responses in one request."""
    max_concurrent_requests: int = Field(4, ge=1)
    """Largest number of requests in flight."""
    request_seconds: float = Field(120.0, gt=0)
    """Wall-clock limit of one request, after which it is sent again."""
    step_seconds: float = Field(600.0, gt=0)
    """Wall-clock limit of all responses of a step. A response without a result by then has no score."""
    weight: float = 1.0
    """Weight of this source in the sum."""

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        if problem := address_problem(url):
            raise ValueError(problem)
        return url

    @model_validator(mode="after")
    def _a_request_fits_a_step(self) -> Self:
        if self.request_seconds > self.step_seconds:
            raise ValueError(
                f"request_seconds ({self.request_seconds:g}) must not exceed step_seconds ({self.step_seconds:g})"
            )
        return self
