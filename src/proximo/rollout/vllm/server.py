"""One vLLM server, by its HTTP interface, and the time for which it cannot be reached (a restart)."""

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from proximo.http_client import HttpClient, RequestRefusedError, UnansweredError
from proximo.rollout.vllm.requests import GENERATE_PATH, Choice, InvalidReplyError, ids_body, read_choice, read_logprobs

LOG = logging.getLogger("proximo.rollout")
SAY_EVERY_SECONDS = 60.0
CONTROL_SECONDS = 60.0
"""Limit of a small request: a question about weights, a pause."""
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
"""Longest pause between two attempts. Pauses double up to it."""
Result = TypeVar("Result")


class Absence:
    """The absence of one server. It ends when the server answers. Thread-safe."""

    def __init__(self, url: str, *, seconds: float, section: str = "engine") -> None:
        """`seconds`: the longest wait. `section`: of the recipe, for messages."""
        self._url = url
        self._seconds = seconds
        self._section = section
        self._since: float | None = None
        self._said = 0.0
        self._lock = threading.Lock()

    def noticed(self, reason: str) -> None:
        """Note that a request reached no server. Logs the wait, and again each minute."""
        with self._lock:
            now = time.monotonic()
            if self._since is None:
                self._since, self._said = now, -SAY_EVERY_SECONDS
            away = now - self._since
            if away < self._said + SAY_EVERY_SECONDS:
                return
            self._said = away
        LOG.warning(
            "the vLLM server %s has not been reachable for %.0f s (%s): waiting for it, at most %g s "
            "(%s.start_seconds)",
            *(self._url, away, reason, self._seconds, self._section),
        )

    def ended(self) -> None:
        """Note that the server answers. The next absence starts at 0 again."""
        with self._lock:
            since, self._since = self._since, None
        if since is not None:
            LOG.warning("the vLLM server %s answers again after %.0f s", self._url, time.monotonic() - since)

    @property
    def is_under_way(self) -> bool:
        """Whether the last request reached no server."""
        return self._since is not None

    @property
    def is_too_long(self) -> bool:
        """Whether it has lasted as long as the longest wait."""
        since = self._since
        return since is not None and time.monotonic() - since >= self._seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    """Deadlines and load of one server."""

    max_concurrent_requests: int = 256
    """Responses that are asked for at a time."""
    request_seconds: float = 600.0
    """Limit of one response."""
    push_seconds: float = 600.0
    """Limit of loading the weights of one push."""
    start_seconds: float = 900.0
    """Seconds to wait for a server that cannot be reached: it may be restarting."""
    section: str = "engine"
    """The section of the recipe that has these settings, for messages."""


class VLLMServer:
    """Requests to one server. Thread-safe.

    All methods raise UnansweredError where another attempt may succeed, and RequestRefusedError where none will.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        limits: ServerLimits | None = None,
        has_ended: Callable[[], bool] = lambda: False,
        last_words: Callable[[], str] = lambda: "the server's log says more",
        restart: Callable[[], bool] = lambda: False,
    ) -> None:
        """`has_ended`: whether the server has certainly ended. `last_words`: information about its end, or where to
        look, for messages. `restart`: starts it again if it has ended; whether it did.
        """
        self.has_ended = has_ended
        self.limits = limits or ServerLimits()
        self.last_words = last_words
        self._restart = restart
        self.num_restarts = 0
        kept = self.limits.max_concurrent_requests
        self._slots = threading.BoundedSemaphore(kept)
        self._client = HttpClient(url, token=token, kept_connections=kept, advice=partial(_advice, self.limits.section))
        self.url = self._client.url
        self.absence = Absence(self.url, seconds=self.limits.start_seconds, section=self.limits.section)
        self._closed = threading.Event()

    def generate(self, body: bytes, *, limit: int, vocab_size: int) -> Choice:
        """One response, of at most `limit` tokens."""
        return self._generated(body, partial(read_choice, limit=limit, vocab_size=vocab_size))

    def prompt_logprobs(self, token_ids: Sequence[int], *, start: int) -> tuple[float, ...]:
        """The log-prob of each id from index `start` on, given all before it, at temperature 1."""
        return self._generated(ids_body(token_ids), partial(read_logprobs, token_ids=token_ids, start=start))

    def _generated(self, body: bytes, read: Callable[[bytes], Result]) -> Result:
        with self._slots:  # calls of several threads share the server
            reply = self._send("POST", GENERATE_PATH, body, seconds=self.limits.request_seconds)
        try:
            return read(reply)
        except InvalidReplyError as error:
            raise UnansweredError(f"invalid reply: {error}") from None

    def weight_version(self) -> str:
        """The version of the weights that it samples with, as the last push named it."""
        found = self._ask("GET", "/weight_info").get("weight_version")
        if not isinstance(found, str):
            raise UnansweredError("invalid reply: no weight version")
        return found

    def load_weights(self, update: Mapping[str, Any], *, version: str, memory: Mapping[str, Any] | None = None) -> None:
        """Load all or some tensors, and drop the caches of the earlier weights.

        `update`: where they are, and their digest; the server refuses others. `memory`: opens the memory that they are
        in. For both see `inside/proximo_vllm.py`.
        """
        # Responses that are being sampled keep their tokens and wait. The pause drops all keys and values, those of
        # prefixes too, which the weights of before have made.
        self._ask("POST", "/pause?mode=keep", {})
        try:
            self._ask("POST", "/init_weight_transfer_engine", {"init_info": dict(memory or {})})
            self._start_update()
            self._ask("POST", "/update_weights", {"update_info": dict(update)}, seconds=self.limits.push_seconds)
            self._ask("POST", "/finish_weight_update", {"weight_version": version}, seconds=self.limits.push_seconds)
        except BaseException:
            # Report the error of the push. A server may close the connection after that error.
            for _ in range(2):
                with suppress(UnansweredError, RequestRefusedError):
                    self._ask("POST", "/resume", {})
                    break
            raise
        self._ask("POST", "/resume", {})

    def _start_update(self) -> None:
        try:
            self._ask("POST", "/start_weight_update", {})
        except UnansweredError:
            # An earlier trainer may have ended within an update, which the server then holds open.
            with suppress(UnansweredError, RequestRefusedError):
                self._ask("POST", "/finish_weight_update", {})
            self._ask("POST", "/start_weight_update", {})

    def adapters(self) -> list[str]:
        """The names of the adapters that it has loaded."""
        return [str(each.get("id")) for each in self._models() if each.get("parent")]

    def max_model_len(self) -> int | None:
        """Longest prompt and response together that it takes; None if it does not say so."""
        found = (each.get("max_model_len") for each in self._models())
        return next((length for length in found if type(length) is int), None)

    def model(self) -> str:
        """The model that it serves, as its start named it; "" if it does not say so."""
        return next((str(each.get("root")) for each in self._models() if not each.get("parent")), "")

    def _models(self) -> list[Mapping[str, Any]]:
        models = self._ask("GET", "/v1/models").get("data")
        if not isinstance(models, list):
            raise UnansweredError("invalid reply: no list of models")
        return [each for each in models if isinstance(each, dict)]

    def load_adapter(self, folder: Path, *, name: str, kept: Collection[str] = ()) -> None:
        """Load a LoRA adapter from a folder in PEFT's layout, and unload earlier ones but those that are `kept`."""
        earlier = self.adapters()
        if name not in earlier:
            body = {"lora_name": name, "lora_path": str(folder)}
            self._send("POST", "/v1/load_lora_adapter", body, seconds=self.limits.push_seconds)
        for other in earlier:
            if other != name and other not in kept:
                self._send("POST", "/v1/unload_lora_adapter", {"lora_name": other}, seconds=CONTROL_SECONDS)

    def sleep(self) -> None:
        """Move the weights to the host's memory, and drop the cache of keys and values."""
        self._ask("POST", "/sleep?level=1", {})

    def wake(self) -> None:
        """Move the weights back, if it sleeps."""
        self._ask("POST", "/wake_up", {})

    def is_healthy(self, *, seconds: float) -> bool:
        """Whether it answers now."""
        try:
            self._client.send("GET", "/health", seconds=seconds)
        except (UnansweredError, RequestRefusedError):
            return False
        return True

    def waiting_for_it(self, ask: Callable[[], Result]) -> Result:
        """The result of `ask`. If no server takes its request, or the server disappears, `ask` is called again later.

        Raises UnansweredError once `limits.start_seconds` have passed since the first failure, or the server has ended.
        """
        pause, end = FIRST_PAUSE_SECONDS, math.inf
        while True:
            try:
                return ask()
            except UnansweredError as error:
                end = min(end, time.monotonic() + self.limits.start_seconds)
                is_new = self.restart_if_ended()
                if (error.connection is None and not is_new) or self.has_ended() or time.monotonic() >= end:
                    raise
                if error.connection == "lost":
                    self.absence.noticed(str(error))
                if self._closed.wait(pause):
                    raise
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def restart_if_ended(self) -> bool:
        """Start it again if it has ended, where the run started it, and not too often. Whether it did."""
        is_new = self._restart()
        self.num_restarts += is_new
        return is_new

    def close(self) -> None:
        """Close the connections to the server, which keeps running."""
        self._closed.set()
        self._client.close()

    def _ask(
        self, method: Any, path: str, body: Mapping[str, Any] | None = None, *, seconds: float = CONTROL_SECONDS
    ) -> Mapping[str, Any]:
        reply = self._send(method, path, body, seconds=seconds)
        try:
            message = json.loads(reply)
        except ValueError:
            raise UnansweredError(f"invalid reply to {path}: not JSON") from None
        if not isinstance(message, dict):
            raise UnansweredError(f"invalid reply to {path}: no object")
        return message

    def _send(self, method: Any, path: str, body: bytes | Mapping[str, Any] | None, *, seconds: float) -> bytes:
        """Sends every request except health checks, and notes when the server is unreachable."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        try:
            reply = self._client.send(method, path, data, seconds=seconds)
        except UnansweredError as error:
            if error.connection == "none":
                self.absence.noticed(str(error))
            elif error.connection is None and not error.timed_out:
                self.absence.ended()
            raise
        self.absence.ended()
        return reply


def _advice(section: str, status: int) -> str:
    if status in (401, 403):
        return f"it requires a token: set {section}.token_env to the environment variable that holds it"
    if status == 404:
        return "is it a vLLM server that `proximo engine serve` started?"
    return "the server's log says more"
