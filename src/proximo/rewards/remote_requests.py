"""The requests to a reward service: scores of responses, and checks of rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from proximo.http_client import HttpClient, RequestRefusedError, UnansweredError
from proximo.records import Response, Scored
from proximo.rewards.protocol import (
    CHECK_PATH,
    SCORE_PATH,
    SECONDS_HEADER,
    ProtocolError,
    ProtocolVersionError,
    read_checked,
    read_reply,
)

Reply = TypeVar("Reply")


class Requests:
    """Sends requests to one service. Thread-safe; `close` ends its background thread."""

    def __init__(self, url: str, *, token: str | None, token_env: str | None, kept_connections: int) -> None:
        """`token_env` is the environment variable that held the token, for messages."""
        self.token_env = token_env
        self._client = HttpClient(url, token=token, kept_connections=kept_connections, advice=self._advice)
        self.url = self._client.url

    def ask(self, body: bytes, responses: Sequence[Response], *, seconds: float) -> list[Scored]:
        """The results for `responses`, which are in `body`, within `seconds`.

        Raises UnansweredError and RequestRefusedError.
        """
        return self._post(SCORE_PATH, body, lambda reply: read_reply(reply, responses), seconds=seconds)

    def check(self, body: bytes, *, seconds: float) -> str | None:
        """The problem with a row of `body`, or None. A service that checks no rows refuses with 404.

        Raises UnansweredError and RequestRefusedError.
        """
        return self._post(CHECK_PATH, body, read_checked, seconds=seconds)

    def close(self) -> None:
        """Close the connections that are kept open between requests."""
        self._client.close()

    def _post(self, path: str, body: bytes, read: Callable[[bytes], Reply], *, seconds: float) -> Reply:
        headers: Mapping[str, str] = {SECONDS_HEADER: f"{max(seconds, 0.001):.3f}"}
        reply = self._client.send("POST", path, body, seconds=seconds, headers=headers)
        try:
            return read(reply)
        except ProtocolVersionError as error:
            raise RequestRefusedError(
                f"the service at {self.url} has another protocol version: {error}; use the same version on both sides"
            ) from None
        except ProtocolError as error:
            raise UnansweredError(f"the service sent an invalid reply: {error}") from None

    def _advice(self, status: int) -> str:
        if status in (401, 403):
            if self.token_env is None:
                return "it requires a token: set token_env to the environment variable that holds it"
            return f"the token in the environment variable {self.token_env} is not the one of the service"
        if 300 <= status < 400:
            return "redirects are not followed: set url to the final address"
        if status == 413:
            return "lower responses_per_request, or raise the service's limit"
        return "is url the address of a reward service (`proximo serve-reward`) of this version?"
