"""Records the calls of agents, each a program that owns its loop, as trajectories: one for each id, call after call.

An agent calls the model one call at a time. A call whose client breaks off leaves no trace: its tokens are dropped, and
the next call draws the same numbers. Two clients that call at once under one id make the trajectory a fault, as nobody
could say which of them earned its reward. All methods run in one thread, the event loop of the server; only the session
is also used elsewhere.
"""

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from proximo.environments.conversation import Conversation
from proximo.environments.engine import Limits
from proximo.environments.environment import EnvironmentStep, Observation
from proximo.environments.trajectory import MALFORMED_CALLS, TOOL_CALLS, Trajectory, with_observation
from proximo.errors import ProximoError
from proximo.records import Finish, Message, Prompt
from proximo.rollout.sampling import SamplingOptions
from proximo.rollout.session import CallRequest, ModelCall, Session

HANDOVER_SECONDS = 1.0
"""A second client of a trajectory waits this long for the first to be seen to have gone, as one that timed out and
tries again has."""


class RefusedCallError(Exception):
    """A call that the model does not answer, with the status and the code of the reply."""

    def __init__(self, status: int, code: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.code = code


@dataclass(kw_only=True, eq=False)
class _Running:
    """A call that is being decoded."""

    request: CallRequest
    answer: "asyncio.Future[ModelCall | RefusedCallError]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    client_left: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(kw_only=True, eq=False)
class Recording:
    """A trajectory that is being recorded."""

    id: str
    prompt: Prompt
    """The row. Its tokens come with the first call."""
    sample_index: int
    lane: int
    stream: int
    session: Session
    options: SamplingOptions
    """Options of sampling that the session has."""
    limits: Limits
    max_new_tokens: int
    """Most that one call writes."""
    trajectory: Trajectory | None = None
    """None before the first call was answered."""
    limit: str | None = None
    """The limit of the run that a call went beyond."""
    fault: str | None = None
    """Why the trajectory is worth nothing; one line."""
    num_requests: int = 0
    num_calls: int = 0
    tool_calls: tuple[int, int] = (0, 0)
    """How many tools the last reply called, and how many of its calls could not be read."""
    conversations: list[Conversation] = field(default_factory=list)
    """Those of clients that speak in messages."""
    running: _Running | None = None
    begun: float = 0.0
    """When it began, by the clock of the event loop."""
    model_seconds: float = 0.0
    """In which a call waited for its answer."""

    def note(self, call: ModelCall, observation: Observation, text: str, message: Message | None = None) -> None:
        """Append a call that was answered. `observation`: what was new in its prompt."""
        if self.trajectory is None:
            asked = with_observation(self.prompt, observation, call.request.token_ids)
            self.trajectory = Trajectory(prompt=asked, sample_index=self.sample_index)
        else:
            self.answer(EnvironmentStep(observation=observation))
        self.trajectory.add_call(call, text, message)
        self.num_calls += 1
        self.tool_calls = (0, 0)

    def answer(self, step: EnvironmentStep) -> None:
        """Note what followed the last call: messages of the agent, or its reward at the end."""
        assert self.trajectory is not None, "something was called before"
        counts = {key: n for key, n in zip((TOOL_CALLS, MALFORMED_CALLS), self.tool_calls, strict=True) if n}
        self.trajectory.add_answer(replace(step, info={**counts, **step.info}))


class Recorder:
    """The trajectories that are being recorded."""

    def __init__(self) -> None:
        self._recordings: dict[str, Recording] = {}
        self._decoded: dict[Hashable, _Running] = {}
        self.num_broken_off = 0
        """Calls whose client left before they were answered."""

    def begin(self, recording: Recording) -> None:
        """Answer calls of this id from now on."""
        recording.begun = asyncio.get_running_loop().time()
        self._recordings[recording.id] = recording

    def end(self, id: str) -> None:
        """Answer no further calls of this id. One that waits is refused."""
        recording = self._recordings.pop(id, None)
        if recording is not None and recording.running is not None:
            self._decoded.pop(recording.running.request.id, None)
            if not recording.running.answer.done():
                recording.running.answer.set_result(_unknown())

    def find(self, id: str | None) -> Recording:
        """The trajectory of an id. Raises RefusedCallError if there is none, or it has ended."""
        if id is None:
            reason = "name the trajectory in the address, /t/ID/v1, or in the header X-Session-ID"
            raise RefusedCallError(404, "no_trajectory", reason)
        if id not in self._recordings:
            raise _unknown()
        return self._recordings[id]

    def _check_open(self, recording: Recording) -> None:
        """Raises RefusedCallError for a trajectory that ended while something was awaited."""
        if self._recordings.get(recording.id) is not recording:
            raise _unknown()

    async def call(self, recording: Recording, token_ids: Sequence[int], max_new_tokens: int | None) -> ModelCall:
        """The model's answer. Raises RefusedCallError. If it is cancelled, because the client left, nothing is noted.

        The caller notes the answer without waiting in between.
        """
        await self._wait_for_turn(recording)
        self._check_open(recording)
        request = self._request(recording, token_ids, max_new_tokens)
        try:
            recording.session.submit(request)
        except ProximoError as error:
            raise RefusedCallError(503, "no_model", str(error)) from error
        recording.num_requests += 1
        recording.running = running = _Running(request=request)
        self._decoded[request.id] = running
        clock = asyncio.get_running_loop().time
        asked = clock()
        try:
            call = await asyncio.shield(running.answer)
        except asyncio.CancelledError:
            self.num_broken_off += 1
            running.client_left.set()
            raise
        recording.running = None
        recording.model_seconds += clock() - asked
        if isinstance(call, RefusedCallError):
            raise call
        self._check_open(recording)
        if call.finish is Finish.ABORTED:
            recording.fault = "the engine gave up a call of the policy"
            raise RefusedCallError(503, "fault", recording.fault)
        return call

    def answered(self, call: ModelCall) -> None:
        """The session has decoded a call. One of a trajectory that has ended is dropped."""
        running = self._decoded.pop(call.request.id, None)
        if running is not None and not running.answer.done():
            running.answer.set_result(call)

    async def _wait_for_turn(self, recording: Recording) -> None:
        """Wait for the end of a call whose client left. Raises RefusedCallError if a client still waits for it."""
        while (earlier := recording.running) is not None:
            try:
                await asyncio.wait_for(earlier.client_left.wait(), HANDOVER_SECONDS)
            except TimeoutError:
                recording.fault = "two clients called the model at once under the id of one trajectory"
                raise RefusedCallError(409, "two_clients", recording.fault) from None
            await asyncio.wait([earlier.answer])
            if recording.running is earlier:
                recording.running = None

    def _request(self, recording: Recording, token_ids: Sequence[int], max_new_tokens: int | None) -> CallRequest:
        limits = recording.limits
        if recording.fault is not None:
            raise RefusedCallError(409, "fault", recording.fault)
        room = limits.max_tokens - len(token_ids)
        if recording.num_calls >= limits.max_turns:
            raise self._beyond(recording, "max_turns", f"this trajectory had {limits.max_turns} calls, which is all")
        age = asyncio.get_running_loop().time() - recording.begun
        if limits.max_seconds is not None and age > limits.max_seconds:
            raise self._beyond(recording, "max_seconds", f"this trajectory is older than {limits.max_seconds:g} s")
        if room < 1:
            reason = f"{len(token_ids)} tokens leave no room for an answer: {limits.max_tokens} are all"
            raise self._beyond(recording, "context_length_exceeded", reason)
        wanted = recording.max_new_tokens if max_new_tokens is None else max_new_tokens
        return CallRequest(
            id=(recording.id, recording.num_requests),
            lane=recording.lane,
            token_ids=tuple(token_ids),
            stream=recording.stream,
            first_position=0 if recording.trajectory is None else recording.trajectory.num_drawn,
            max_new_tokens=max(1, min(wanted, recording.max_new_tokens, room)),
        )

    def _beyond(self, recording: Recording, code: str, reason: str) -> RefusedCallError:
        recording.limit = code
        return RefusedCallError(400, code, reason)


def _unknown() -> RefusedCallError:
    return RefusedCallError(404, "unknown_trajectory", "no trajectory of this id is being recorded; it may have ended")
