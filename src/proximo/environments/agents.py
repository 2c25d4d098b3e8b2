"""Agents as environments: a program asks the policy over HTTP, and its reward ends the trajectory.

The program owns its loop, so the loop here is short: it starts programs, decodes what they ask, and takes their
rewards. What a trajectory is made of, the server records.
"""

import secrets
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from json import dumps

from proximo.environments.call_requests import Vocabulary
from proximo.environments.chat_calls import ChatCalls
from proximo.environments.dialogue import Dialogue
from proximo.environments.engine import WAIT_SECONDS, Arena, Lane, Play
from proximo.environments.environment import EnvironmentFault, EnvironmentStep
from proximo.environments.recorder import Recording
from proximo.environments.server import ModelServer
from proximo.environments.tool_calls import Tools
from proximo.environments.turn_renderer import TurnRenderer
from proximo.environments.verifiers_process import VerifiersProcess
from proximo.metrics.values import MetricValue, Sum
from proximo.records import Finish, Message, Response
from proximo.rollout.sampling import SamplingOptions
from proximo.rollout.session import Session

NO_TOKEN = "none"
"""What clients that insist on a key are given where no token is asked for."""


def model_server(renderer: TurnRenderer, *, max_tokens: int, host: str, token: str | None) -> ModelServer:
    """A server of the policy. `renderer`: with a tokenizer of its own. Raises ConfigError."""
    tokenizer = renderer.tokenizer

    def begin(messages: Sequence[Message], tools: Tools) -> Dialogue:
        if tools:
            renderer.check_tools()
        return Dialogue(renderer, messages, tools=tools)

    chat = ChatCalls(
        tokenizer=tokenizer,
        begin=begin,
        style=renderer.tool_style,
        vocabulary=Vocabulary(size=len(tokenizer), special_ids=frozenset(tokenizer.all_special_ids)),
    )
    return ModelServer(chat, max_model_len=max_tokens, host=host, token=token)


@dataclass(frozen=True, kw_only=True)
class AgentArena(Arena):
    """Where agents play: programs, and the server that they ask."""

    server: ModelServer
    token: str | None = None
    helper: VerifiersProcess | None = None
    """What the programs ask besides."""

    def play(self, session: Session, options: SamplingOptions, on_finished: Callable[[Response], None]) -> "AgentPlay":
        """The loop of one call of `generate`."""
        return AgentPlay(self, session, options, on_finished)

    def counts(self) -> dict[str, MetricValue]:
        """What became of the calls that were not answered, since the last call."""
        return {f"environment/{name}": Sum(count) for name, count in self.server.counts().items()}

    def close(self) -> None:
        """End all programs, and what they ask."""
        super().close()
        self.server.close()
        if self.helper is not None:
            self.helper.close()


class AgentPlay(Play):
    """The loop of one call of `generate`: programs ask, the session decodes, rewards end trajectories."""

    def __init__(
        self, arena: AgentArena, session: Session, options: SamplingOptions, on_finished: Callable[[Response], None]
    ) -> None:
        super().__init__(arena, session, on_finished)
        self._server, self._key = arena.server, arena.token or NO_TOKEN
        self._options = options
        self._recordings: dict[Hashable, Recording] = {}

    def advance(self) -> None:
        """Take what programs returned, and decode one block of tokens of what they ask."""
        for number, answer in self._environments.poll(0.0):
            if (lane := self._playing.get(number)) is not None:
                self._take(lane, answer)
        decodes, begun = self._session.num_running > 0, self._clock()
        self._server.answered(self._session.advance(WAIT_SECONDS))
        seconds = self._clock() - begun
        self.times.model += seconds if decodes else 0.0
        self.times.waiting += 0.0 if decodes else seconds

    def _take(self, lane: Lane, answer: EnvironmentStep | EnvironmentFault) -> None:
        """Run the program, or end its trajectory."""
        recording = self._recordings.get(lane.number)
        if recording is None and isinstance(answer, EnvironmentStep):
            self._run(lane)
            return
        if recording is not None:
            self._server.end(recording.id)
            self._note(lane, recording, answer)
        finish, failure = _outcome(recording, answer)
        self._end(lane, finish, failure=failure)

    def _run(self, lane: Lane) -> None:
        recording = self._recordings[lane.number] = Recording(
            id=secrets.token_urlsafe(16),
            prompt=lane.prompt,
            sample_index=lane.sample_index,
            lane=lane.number,
            stream=lane.stream,
            session=self._session,
            options=self._options,
            limits=self._limits,
            max_new_tokens=lane.limit,
        )
        self._server.begin(recording)
        where = {"base_url": self._server.base_url(recording.id), "api_key": self._key, "trajectory": recording.id}
        self._environments.step(lane.number, dumps(where))

    def _note(self, lane: Lane, recording: Recording, answer: EnvironmentStep | EnvironmentFault) -> None:
        """What the program did becomes the trajectory of its lane."""
        if recording.trajectory is None:
            return
        lane.trajectory = recording.trajectory
        step = EnvironmentStep(observation="") if isinstance(answer, EnvironmentFault) else answer
        self.times.environments += max(0.0, step.seconds - recording.model_seconds)
        recording.answer(step)

    def _leave(self, number: int) -> None:
        recording = self._recordings.pop(number, None)
        if recording is not None:
            self._server.end(recording.id)
        super()._leave(number)


def _outcome(recording: Recording | None, answer: EnvironmentStep | EnvironmentFault) -> tuple[Finish, str | None]:
    """How a trajectory ended, and why it is worth nothing, if it is.

    A program that raises because a limit of the run refused its call has reached that limit: it earned nothing.
    """
    fault = answer if isinstance(answer, EnvironmentFault) else None
    failure = None if fault is None else f"{fault.kind}: {fault.reason}"
    if recording is not None and recording.fault is not None:
        return Finish.ABORTED, f"client: {recording.fault}"
    if recording is None or recording.trajectory is None:
        return Finish.ABORTED, failure or "agent: the program ended without a call of the model"
    if recording.limit is not None and (fault is None or fault.kind == "error"):
        return Finish.LENGTH, None
    if failure is not None:
        return Finish.ABORTED, failure
    is_cut = isinstance(answer, EnvironmentStep) and answer.truncated
    return Finish.TRUNCATED if is_cut else Finish.TERMINATED, None
