"""A session of the vLLM engine: each call is a request, whose beginning the server has in its own prefix cache."""

from collections.abc import Callable, Hashable, Sequence
from itertools import count

from proximo.errors import TrainingError
from proximo.rollout.session import CallRequest, ModelCall, check_call
from proximo.rollout.vllm.dispatch import Dispatch, Job
from proximo.rollout.vllm.server import VLLMServer


class VLLMSession:
    """See `Session`. Calls of a lane go to the same server, unless it fails."""

    def __init__(
        self,
        servers: Sequence[VLLMServer],
        ask: Callable[[VLLMServer, CallRequest], ModelCall],
        *,
        attempts: int,
        max_tokens: int,
        max_positions: int | None,
    ) -> None:
        """`ask`: sends one call to a server, as `Job.ask` does. `attempts`: at each call."""
        self.dispatch: Dispatch[tuple[int, ModelCall | None]] = Dispatch(servers, [], attempts=attempts)
        self._ask = ask
        self._num_servers = len(servers)
        self._max_tokens = max_tokens
        self._max_positions = max_positions
        self._numbers, self._lanes = count(), count()
        self._running: dict[int, CallRequest] = {}
        """By number. Dictionaries are changed by one operation each, so threads need no lock."""
        self._homes: dict[Hashable, int] = {}
        self._failure: BaseException | None = None

    @property
    def num_running(self) -> int:
        """Calls that a server has and has not answered."""
        return len(self._running)

    def submit(self, *requests: CallRequest) -> None:
        """Send calls to the servers of their lanes. Raises UserError for one that does not fit."""
        for request in requests:
            check_call(request, max_tokens=self._max_tokens, max_positions=self._max_positions)
        self._raise_failure()
        self.dispatch.add([self._job(request) for request in requests])

    def _job(self, request: CallRequest) -> Job[tuple[int, ModelCall | None]]:
        number = next(self._numbers)
        if (home := self._homes.get(request.lane)) is None:
            home = self._homes.setdefault(request.lane, next(self._lanes) % self._num_servers)
        self._running[number] = request

        def ask(server: VLLMServer) -> tuple[int, ModelCall | None]:
            return number, self._ask(server, request) if number in self._running else None

        return Job(home=home, ask=ask)

    def advance(self, wait_seconds: float) -> list[ModelCall]:
        """See `Session.advance`. Waits at most this long for a call that ends."""
        self._raise_failure()
        try:
            results = self.dispatch.results(wait_seconds)
        except BaseException as error:
            self.end(error)
            raise
        return [call for number, call in results if self._running.pop(number, None) and call is not None]

    def forget(self, lane: Hashable) -> None:
        """See `Session.forget`. The server may go on with a request, whose reply is then dropped."""
        self._homes.pop(lane, None)
        for number, request in list(self._running.items()):
            if request.lane == lane:
                self._running.pop(number, None)

    def end(self, reason: BaseException) -> None:
        """End the session and all its calls. Whoever uses it from now on is told the reason."""
        self._failure = self._failure or reason
        self._running.clear()
        self.dispatch.close()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise TrainingError(f"the session has ended: {self._failure}") from self._failure
