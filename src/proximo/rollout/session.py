"""Calls of the model that come and go while others are decoded: what an environment, an agent or a server needs."""

from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from proximo.errors import UserError
from proximo.records import Finish, SamplingMask
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
    """[n] As in `Response`."""
    finish: Finish
    versions: tuple[tuple[int, int], ...]
    """Versions of the policy, each with the index of its first token in `token_ids`."""
    sampling_mask: SamplingMask | None = None
    """As in `Response`."""


class Session(Protocol):
    """A model that decodes calls, which may be submitted while others are decoded."""

    @property
    def num_running(self) -> int:
        """Calls that were submitted and have not ended."""
        ...

    def submit(self, request: CallRequest) -> None:
        """Add a call. May be called from any thread.

        Raises UserError for a call without ids or one that is too long, and TrainingError if the session has ended.
        """
        ...

    def advance(self, wait_seconds: float) -> list[ModelCall]:
        """Decode one block of tokens of all running calls. Returns the calls that ended.

        If nothing runs it waits at most this long for a call. An error ends the session: it is raised here, calls that
        had not ended are lost, and later uses raise TrainingError.
        """
        ...

    def forget(self, lane: Hashable) -> None:
        """Drop what is kept of a lane, and its calls that have not ended. May be called from any thread."""
        ...


@runtime_checkable
class SessionEngine(Protocol):
    """An engine that opens sessions."""

    def session(self, options: SamplingOptions, *, max_tokens: int) -> AbstractContextManager[Session]:
        """A session that ends with the context. `max_tokens`: most ids of one call, read and written together.

        Of `options`, length limits are not read: each call has its own. Raises UserError for `min_new_tokens`.
        """
        ...


def check_options(options: SamplingOptions) -> None:
    """Raises UserError for options that calls of a session cannot have."""
    if options.min_new_tokens > 0:
        raise UserError(
            f"min_new_tokens ({options.min_new_tokens}) is not possible where a policy acts over several turns: a turn "
            "ends where the policy ends it; leave it out"
        )


def check_call(request: CallRequest, *, max_tokens: int, max_positions: int | None) -> None:
    """Raises UserError for a call without ids or without new ones, or one that is too long for session or model."""
    if not request.token_ids or request.max_new_tokens < 1:
        raise UserError(
            f"a call needs ids to read and at least one new token, and {request.id!r} has {len(request.token_ids)} ids "
            f"and max_new_tokens {request.max_new_tokens}"
        )
    wanted = len(request.token_ids) + request.max_new_tokens
    limit = max_tokens if max_positions is None else min(max_tokens, max_positions)
    if wanted > limit:
        raise UserError(
            f"the call {request.id!r} reads {len(request.token_ids)} tokens, which with max_new_tokens "
            f"({request.max_new_tokens}) makes {wanted}, but a call may have {limit}; end its trajectory earlier"
        )
