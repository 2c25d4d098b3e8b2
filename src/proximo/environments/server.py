"""The policy as a server, for agents that only want a `base_url`. It answers and records; the engine decodes elsewhere.

| path, behind /t/ID or with the header X-Session-ID: ID | purpose |
|---|---|
| GET /v1/models | the name of the model and its longest context |
| POST /inference/v1/generate | vLLM's interface: token ids in; token ids, log-probs, versions of the weights out |
| POST /v1/chat/completions | OpenAI's interface: messages and tools in, a message out; see chat_calls.py |

An ID is a secret of one trajectory, and answers nothing once that has ended. A token may be asked for besides.
"""

import asyncio
import json
import logging
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proximo.environments.call_requests import SampledCall, generate_reply, read_generate
from proximo.environments.chat_calls import ChatCalls
from proximo.environments.recorder import Recorder, Recording, RefusedCallError
from proximo.errors import ConfigError, TrainingError
from proximo.http_service import authorise, http_server, read_body
from proximo.rollout.session import ModelCall
from proximo.rollout.vllm.requests import GENERATE_PATH

LOG = logging.getLogger("proximo.environments")
MODEL = "policy"
SESSION_HEADER = "X-Session-ID"
MAX_WAITING = 1024
"""Requests that are answered at a time; further ones get status 503 and may be sent again."""
MAX_BODY_BYTES = 16 * 2**20
START_SECONDS = 30.0
ANSWER_SECONDS = 30.0
"""Limit of what the thread of the server does for another thread: a moment, unless the machine is overloaded."""
NOT_AGAIN = {"x-should-retry": "false"}
"""Tells OpenAI's clients that the same request would be refused again."""


class ModelServer:
    """Serves calls of the trajectories that were begun. It has a thread; `close` ends it."""

    def __init__(self, chat: ChatCalls, *, max_model_len: int, host: str, token: str | None = None) -> None:
        """`host`: an address of this machine. Raises ConfigError if it cannot be listened on."""
        self.recorder = Recorder()
        self.refused: Counter[str] = Counter()
        self.ignored: Counter[str] = Counter()
        """Options of clients that have no effect, by name."""
        self._seen: Counter[str] = Counter()
        self._chat = chat
        self._max_model_len = max_model_len
        self._token = token
        self._num_admitted = 0
        self._listener, self.url = _listening(host)
        self._loop = asyncio.new_event_loop()
        self._server = http_server(self._application(), grace_seconds=1)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="model-server")
        self._thread.start()
        self.in_loop(lambda: None)

    def base_url(self, id: str) -> str:
        """What a client of this trajectory is given."""
        return f"{self.url}/t/{id}/v1"

    def begin(self, *recordings: Recording) -> None:
        """Answer calls of these trajectories from now on."""
        self.in_loop(lambda: [self.recorder.begin(recording) for recording in recordings])

    def end(self, id: str) -> None:
        """Answer no further calls of a trajectory, if it has not ended before; one that waits is refused.

        Its recording does not change any more.
        """
        self.in_loop(lambda: self.recorder.end(id))

    def answered(self, calls: Sequence[ModelCall]) -> None:
        """Give clients what the session has decoded. From any thread."""
        self._loop.call_soon_threadsafe(lambda: [self.recorder.answered(call) for call in calls])

    def counts(self) -> dict[str, int]:
        """Requests that were refused, options without effect, and calls whose client left, since the last look."""
        found = {
            "refused_calls": self.refused.total(),
            "ignored_options": self.ignored.total(),
            "broken_off_calls": self.recorder.num_broken_off,
        }
        new = {name: count - self._seen[name] for name, count in found.items()}
        self._seen = Counter(found)
        return new

    def in_loop(self, work: Callable[[], object]) -> None:
        """Do something in the thread of the server, and wait. Raises TrainingError if that has ended or hangs."""

        async def done() -> None:
            work()

        try:
            asyncio.run_coroutine_threadsafe(done(), self._loop).result(ANSWER_SECONDS)
        except (TimeoutError, RuntimeError) as error:
            raise TrainingError(f"the server of the model at {self.url} does not answer: {error}") from error

    def close(self) -> None:
        """End the server and its thread."""
        self._server.should_exit = True
        self._thread.join(START_SECONDS)
        self._listener.close()

    def _serve(self) -> None:
        """The work of the thread."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._server.serve(sockets=[self._listener]))

    def _application(self) -> Starlette:
        routes = [
            Route(prefix + path, self._admit(answer), methods=[method])
            for prefix in ("", "/t/{id}")
            for path, answer, method in (
                ("/v1/models", self._models, "GET"),
                (GENERATE_PATH, self._generate, "POST"),
                ("/v1/chat/completions", self._complete, "POST"),
            )
        ]
        handlers = {HTTPException: self._refuse, RefusedCallError: self._refuse_call}
        return Starlette(routes=routes, exception_handlers=handlers)

    def _admit(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def admitted(request: Request) -> Response:
            authorise(request, self._token)
            if self._num_admitted >= MAX_WAITING:
                raise HTTPException(503, "too many requests are waiting", {"Retry-After": "1"})
            self._num_admitted += 1
            try:
                return await answer(request)
            finally:
                self._num_admitted -= 1

        return admitted

    def _refuse(self, _: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        self.refused[str(error.status_code)] += 1
        return _error(error.status_code, f"status_{error.status_code}", error.detail, error.headers)

    def _refuse_call(self, _: Request, error: Exception) -> Response:
        assert isinstance(error, RefusedCallError)
        self.refused[error.code] += 1
        return _error(error.status, error.code, str(error), NOT_AGAIN)

    async def _models(self, _: Request) -> Response:
        model = {"id": MODEL, "object": "model", "owned_by": "proximo", "max_model_len": self._max_model_len}
        return JSONResponse({"object": "list", "data": [model]})

    async def _generate(self, request: Request) -> Response:
        recording, body = await self._read(request)
        asked = read_generate(body, recording, self._chat.vocabulary)

        def reply(call: ModelCall) -> Response:
            self._chat.note_ids(recording, call)
            return JSONResponse(generate_reply(call, MODEL))

        return await self._answer(request, recording, asked, reply)

    async def _complete(self, request: Request) -> Response:
        recording, body = await self._read(request)
        asked = self._chat.read(recording, body)
        return await self._answer(
            request, recording, asked, lambda call: self._chat.reply(recording, asked, call, MODEL)
        )

    async def _answer(
        self, request: Request, recording: Recording, asked: SampledCall, reply: Callable[[ModelCall], Response]
    ) -> Response:
        """Have the model answer. `reply` notes the call and writes what the client gets."""
        self._note_ignored(asked.ignored)

        async def answered() -> Response:
            return reply(await self.recorder.call(recording, asked.token_ids, asked.max_new_tokens))

        return await _unless_client_leaves(request, answered())

    async def _read(self, request: Request) -> tuple[Recording, Mapping[str, Any]]:
        """The trajectory and the body of a request."""
        # verifiers numbers the conversations of an episode: ID.0, ID.1
        id = request.path_params.get("id") or request.headers.get(SESSION_HEADER, "").partition(".")[0] or None
        recording = self.recorder.find(id)
        try:
            body = json.loads(await read_body(request, max_bytes=MAX_BODY_BYTES))
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"the body is not JSON: {error!s:.100}") from None
        if not isinstance(body, dict):
            raise HTTPException(400, "the body is not a JSON object")
        return recording, body

    def _note_ignored(self, names: Sequence[str]) -> None:
        """Count options without effect. The first of each name is logged."""
        for name in names:
            if name not in self.ignored:
                LOG.warning("agents ask for %s, which the run decides: it has no effect (ppo.rollout)", name)
            self.ignored[name] += 1


async def _unless_client_leaves(request: Request, work: Awaitable[Response]) -> Response:
    """The result of the work, which is cancelled if the client breaks off. Raises HTTPException then."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(request.receive())  # the body has been read: what comes next is the end
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
            raise HTTPException(400, "the client disconnected")
        return task.result()
    finally:
        left.cancel()


def _error(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """A refusal in OpenAI's form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "code": code, "param": None}}
    return JSONResponse(body, status_code=status, headers=None if headers is None else dict(headers))


def _listening(host: str) -> tuple[socket.socket, str]:
    """A socket that is bound, with the address for clients. Raises ConfigError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=MAX_WAITING)
    except OSError as error:
        raise ConfigError(f"environment.host: cannot listen on {host}: {error}") from error
    said = f"[{host}]" if ":" in host else host
    return listener, f"http://{said}:{listener.getsockname()[1]}"
