"""Calls of the model that come and go while others are decoded: what an environment, an agent or a server needs."""

from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from proximo.records import Finish
from proximo.rollout.sampling import SamplingOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRequest:
    """One call of the model: the ids that it reads, and which draws it makes."""

    id: Hashable
    """Identifies the call in its session."""
    lane: Hashable
    """The trajectory of the call. The cache of a lane's last call is kept if there is room."""
    token_ids: tuple[int, ...]
    """All ids that the model reads."""
    stream: int
    """`RandomKey.stream` of the trajectory. Draws are a function of it and the position of the token."""
    first_position: int
    """Position of the first token drawn: the number of tokens drawn before in this trajectory."""
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCall:
    """A call that ended: what the model wrote."""

    request: CallRequest
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """[n] log softmax(logits / temperature) of each token."""
    finish: Finish
    versions: tuple[tuple[int, int], ...]
    """Versions of the policy, each with the index of its first token in `token_ids`."""


class Session(Protocol):
    """A model that decodes calls, which may be submitted while others are decoded."""

    @property
    def num_running(self) -> int:
        """Calls that were submitted and have not ended."""
        ...

    def submit(self, request: CallRequest) -> None:
        """Add a call. May be called from any thread."""
        ...

    def advance(self, wait_seconds: float) -> list[ModelCall]:
        """Decode one block of tokens of all running calls. Returns the calls that ended.

        If nothing runs it waits at most this long for a call.
        """
        ...

    def forget(self, lane: Hashable) -> None:
        """Drop what is kept of a lane: its trajectory has ended."""
        ...


@runtime_checkable
class SessionEngine(Protocol):
    """An engine that opens sessions."""

    def session(self, options: SamplingOptions, *, max_tokens: int) -> AbstractContextManager[Session]:
        """A session that ends with the context. `max_tokens`: most ids of one call, read and written together."""
        ...
