"""Stand-ins for what episodes are played with: environments, a session without a model, dialogues of numbers."""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from proximo.environments.engine import Arena, Limits
from proximo.environments.environment import EnvironmentFault, EnvironmentStep
from proximo.records import Finish, Prompt
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.rollout.session import CallRequest, ModelCall

END = 9
"""The token that ends a turn of the session below."""


class Clock:
    """A clock that tests move by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeEnvironments:
    """Plays objects with `reset` and `step` in this thread. An answer arrives after its delay."""

    make: Callable[[], Any]
    clock: Clock = field(default_factory=Clock)
    delay: Callable[[int], float] = lambda lane: 0.0
    playing: dict[int, Any] = field(default_factory=dict)
    starts: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    most_at_once: int = 0
    _answers: list[tuple[float, int, Any]] = field(default_factory=list)

    def start(self, lane: int, *, seed: int, row: Mapping[str, Any]) -> None:
        self.playing[lane] = self.make()
        self.most_at_once = max(self.most_at_once, len(self.playing))
        self.starts.append((seed, row))
        self._call(lane, lambda: self.playing[lane].reset(seed=seed, row=row))

    def step(self, lane: int, text: str) -> None:
        self._call(lane, lambda: self.playing[lane].step(text))

    def stop(self, lane: int) -> None:
        del self.playing[lane]
        self.stopped.append(lane)

    def take_retries(self) -> int:
        return 0

    def poll(self, wait_seconds: float) -> list[tuple[int, Any]]:
        self._answers.sort(key=lambda answer: answer[:2])
        if wait_seconds and self._answers and self._answers[0][0] > self.clock.now:
            self.clock.now = min(self._answers[0][0], self.clock.now + wait_seconds)
        due = [answer for answer in self._answers if answer[0] <= self.clock.now]
        self._answers = self._answers[len(due) :]
        return [(lane, answer) for _, lane, answer in due]

    def close(self) -> None:
        assert not self.playing

    def _call(self, lane: int, method: Callable[[], Any]) -> None:
        try:
            answer = EnvironmentStep(**dict(zip(NAMES, _whole(method()), strict=True)))
        except RuntimeError as error:
            answer = EnvironmentFault(reason=str(error))
        self._answers.append((self.clock.now + self.delay(lane), lane, answer))


NAMES = ("observation", "reward", "terminated", "truncated", "info")


def _whole(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    return (answer[0], 0.0, False, False, answer[1]) if len(answer) == 2 else answer


@dataclass
class FakeSession:
    """Draws tokens as a function of the ids read, the stream and the position; a turn ends after 1 to 4 tokens."""

    seconds: float = 0.0
    """What one pass takes on the clock."""
    clock: Clock = field(default_factory=Clock)
    version: int = 0
    requests: list[CallRequest] = field(default_factory=list)
    forgotten: list[Hashable] = field(default_factory=list)
    num_passes: int = 0
    ended_at: dict[Hashable, int] = field(default_factory=dict)
    """Lane -> number of passes when its last call ended."""
    _running: deque[tuple[CallRequest, list[int]]] = field(default_factory=deque)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, request: CallRequest) -> None:
        assert request.max_new_tokens >= 1
        self.requests.append(request)
        self._running.append((request, []))

    def advance(self, wait_seconds: float) -> list[ModelCall]:
        self.num_passes += 1
        self.clock.now += self.seconds
        ended = []
        for request, drawn in list(self._running):
            draw = hash((request.token_ids, request.stream, request.first_position + len(drawn)))
            drawn.append(END if draw % 3 == 0 or len(drawn) == 3 else 10 + draw % 50)
            if drawn[-1] == END or len(drawn) == request.max_new_tokens:
                self._running.remove((request, drawn))
                self.ended_at[request.lane] = self.num_passes
                ended.append(self._call(request, drawn))
        return ended

    def _call(self, request: CallRequest, drawn: list[int]) -> ModelCall:
        return ModelCall(
            request=request,
            token_ids=tuple(drawn),
            logprobs=(-1.0,) * len(drawn),
            finish=Finish.EOS if drawn[-1] == END else Finish.LENGTH,
            versions=((self.version, 0),),
        )

    def forget(self, lane: Hashable) -> None:
        self.forgotten.append(lane)


class FakeEngine:
    """An engine that does nothing but open one session."""

    logprobs_are_the_learners = True
    max_logprob_error = None

    def __init__(self, session: FakeSession) -> None:
        self.opened = session

    @contextmanager
    def session(self, options: SamplingOptions, *, max_tokens: int):
        yield self.opened

    def generate(self, prompts: Sequence[Prompt], **options: Any) -> list[str]:
        return [f"plain {prompt.id}" for prompt in prompts]

    def load_weights(self, version: int, tensors: Any) -> None:
        self.opened.version = version

    def holds(self) -> None:
        return None


class NumberDialogue:
    """Observations are numbers in text, and so are turns. `thoughts` are dropped from what is read later: a fork."""

    def __init__(self, renderer: None, observation: str, *, tools: Any = None) -> None:
        self.prompt_ids: tuple[int, ...] = (1, *numbers(observation))
        self.num_cut_observations = 0
        self.tools = tools

    def turn_text(self, token_ids: Sequence[int], finish: Finish) -> str:
        return " ".join(map(str, token_ids))

    def answered(self, token_ids: Sequence[int], finish: Finish, observation: str) -> None:
        kept = token_ids[-1:] if "forget" in observation else token_ids
        self.prompt_ids = (*self.prompt_ids, *kept, *numbers(observation.removeprefix("forget")))


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def arena(environments: Any, *, renderer: Any = None, **limits: Any) -> Arena:
    return Arena(environments=environments, renderer=renderer, limits=Limits(**limits), clock=environments.clock)


def rows(count: int) -> list[Prompt]:
    return [Prompt(id=f"row-{i}", token_ids=(), metadata={"number": i}) for i in range(count)]


def play(engine: Any, prompts: Sequence[Prompt], *, num_samples: int = 1, on_finished: Any = None) -> list[Any]:
    return engine.generate(
        prompts,
        num_samples=num_samples,
        options=SamplingOptions(max_new_tokens=8),
        key=RandomKey(seed=0, purpose="rollout", step=0),
        on_finished=on_finished,
    )
