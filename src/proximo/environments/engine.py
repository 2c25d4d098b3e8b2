"""An engine whose responses are trajectories: the policy plays one episode for each sample of each prompt.

An environment that thinks holds no row of the model: its trajectory comes back with the next prompt. Draws depend on
the trajectory and on the position of the token alone, so samples depend neither on the speed of environments nor on
how many are played at once.
"""

import itertools
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from proximo.environments.dialogue import Dialogue
from proximo.environments.environment import EnvironmentFault, EnvironmentStep
from proximo.environments.players.pool import EnvironmentPool
from proximo.environments.tool_calls import Tools, ToolTurn, parse
from proximo.environments.trajectory import Trajectory, with_observation
from proximo.environments.turn_renderer import TurnRenderer
from proximo.errors import ConfigError, DataError, TrainingError
from proximo.metrics.values import MetricValue, Sum
from proximo.models.language import LanguageModel
from proximo.records import Finish, Prompt, Response
from proximo.rollout.asynchronous import ThreadSafeEngine
from proximo.rollout.engine import Engine, Holding, SharingEngine
from proximo.rollout.engine import statistics_of as engine_statistics
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.rollout.session import CallRequest, ModelCall, Session, SessionEngine

WAIT_SECONDS = 0.05
"""Longest wait for answers of environments or of the model, after which both are looked at again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Where the run ends a trajectory, with `Finish.LENGTH`."""

    max_turns: int = 16
    max_tokens: int = 2048
    """Most ids that the policy reads and writes in one call."""
    max_seconds: float | None = None
    """A trajectory that is older begins no further turn. It then depends on the clock; None: no such limit."""


@dataclass(kw_only=True, slots=True)
class PlayTimes:
    """Where the seconds of episodes went."""

    model: float = 0.0
    """The model decoded. Environments may have worked meanwhile."""
    waiting: float = 0.0
    """No row was decoded, because all trajectories waited for their environments."""
    environments: float = 0.0
    """Environments worked, added up over those that did so at the same time."""

    def add(self, other: "PlayTimes") -> None:
        """Add the seconds of other episodes."""
        self.model += other.model
        self.waiting += other.waiting
        self.environments += other.environments

    def clear(self) -> None:
        """Count from 0 again."""
        self.model = self.waiting = self.environments = 0.0


@dataclass(frozen=True, kw_only=True)
class Arena:
    """Where the engines of a run play: its environments, one call of `generate` at a time."""

    environments: EnvironmentPool | None
    """None on a rank that plays none."""
    renderer: TurnRenderer
    limits: Limits = Limits()
    clock: Callable[[], float] = time.monotonic
    turn: threading.Lock = field(default_factory=threading.Lock)
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    """A lane is never used again."""
    times: PlayTimes = field(default_factory=PlayTimes)
    """Times of the rollouts since the last look."""
    gives_reward: bool = True
    """False for a class of tools without `get_reward`, whose episodes earn 0."""

    def engine(self, inner: Engine) -> "EnvironmentEngine":
        """An engine whose responses are trajectories of the model of `inner`."""
        return EnvironmentEngine(inner, self)

    def play(self, session: Session, options: SamplingOptions, on_finished: Callable[[Response], None]) -> "Play":
        """The loop of one call of `generate`."""
        del options  # the session has them
        return Play(self, session, on_finished)

    def counts(self) -> dict[str, MetricValue]:
        """Further metrics since the last call."""
        return {}

    def close(self) -> None:
        """End all environments and their processes."""
        if self.environments is not None:
            self.environments.close()


class EnvironmentEngine:
    """Plays episodes with the sessions of another engine. Prompts are rows; one with token ids is answered plainly."""

    def __init__(self, inner: Engine, arena: Arena) -> None:
        """Raises ConfigError for an engine without sessions."""
        if not isinstance(inner, SessionEngine):
            raise ConfigError(
                f"environments are played in sessions of the engine, and {type(inner).__name__} has no method session: "
                "use the built-in engine or vLLM"
            )
        self.inner: Engine = inner
        self._sessions: SessionEngine = inner
        self._arena = arena
        self._num_stops = 0

    @property
    def logprobs_are_the_learners(self) -> bool:
        """False: the learner computes them again, so that training depends on the tokens alone."""
        return False

    @property
    def max_logprob_error(self) -> float | None:
        """The inner engine's: the largest difference of log-probs that rounding explains; None: not compared."""
        return self.inner.max_logprob_error

    @property
    def thread_safe(self) -> bool:
        """Whether threads may call it at the same time: if the inner engine says so."""
        return isinstance(self.inner, ThreadSafeEngine) and self.inner.thread_safe

    @property
    def samples_a_share(self) -> bool:
        """Whether each rank plays a share of the episodes."""
        return isinstance(self.inner, SharingEngine) and self.inner.samples_a_share

    def samples_from(self, model: LanguageModel) -> bool:
        """Whether this model's own tensors are those that it samples with."""
        return isinstance(self.inner, SharingEngine) and self.inner.samples_from(model)

    def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Sample with these weights from now on. `tensors`: name -> trained tensor."""
        self.inner.load_weights(version, tensors)

    def holds(self) -> Holding | None:
        """The weights that the inner engine would sample with now; None before the first load."""
        return self.inner.holds()

    def stop(self) -> None:
        """End the running calls of `generate` in other threads, which raise TrainingError."""
        self._num_stops += 1
        if isinstance(self.inner, ThreadSafeEngine):
            self.inner.stop()

    def statistics(self) -> Mapping[str, MetricValue]:
        """What rollouts did since the last call (seconds, repeated resets), and the metrics of the other engine."""
        own: dict[str, MetricValue] = {
            "environment/model_seconds": Sum(self._arena.times.model),
            "environment/waiting_seconds": Sum(self._arena.times.waiting),
            "environment/environment_seconds": Sum(self._arena.times.environments),
            "environment/retries": Sum(0 if (played := self._arena.environments) is None else played.take_retries()),
        }
        self._arena.times.clear()
        return own | self._arena.counts() | engine_statistics(self.inner)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int,
        options: SamplingOptions,
        key: RandomKey,
        on_finished: Callable[[Response], None] | None = None,
    ) -> list[Response]:
        """See `Engine.generate`: one trajectory for each sample. A call waits for an earlier one in another thread.

        Samples of one prompt begin with the same seed of the environment. Raises TrainingError if it was stopped.
        """
        if all(prompt.token_ids for prompt in prompts):
            plain = {"num_samples": num_samples, "options": options, "key": key, "on_finished": on_finished}
            return self.inner.generate(prompts, **plain)
        lanes = [
            Lane(
                number=next(self._arena.numbers),
                prompt=prompt,
                sample_index=sample,
                seed=key.episode_seed(prompt.id),
                stream=key.stream(index, sample),
                limit=key.limit(index, options),
            )
            for index, prompt in enumerate(prompts)
            for sample in range(num_samples)
        ]
        num_stops = self._num_stops
        with self._arena.turn, self._sessions.session(options, max_tokens=self._arena.limits.max_tokens) as session:
            play = self._arena.play(session, options, on_finished or _ignore)
            try:
                play.begin(lanes)
                while not play.done:
                    if self._num_stops != num_stops:
                        raise TrainingError("the engine was stopped while it played episodes")
                    play.advance()
            finally:
                play.close()
                if key.purpose == "rollout":
                    self._arena.times.add(play.times)
        return [lane.response for lane in lanes if lane.response is not None]


@dataclass(kw_only=True, slots=True)
class Lane:
    """Where one episode is played: its number among those of an engine, the trajectory so far, what it waits for."""

    number: int
    prompt: Prompt
    sample_index: int
    seed: int
    stream: int
    limit: int
    """Most tokens of one turn."""
    trajectory: Trajectory = field(init=False)
    dialogue: Dialogue | None = None
    """None until the first observation."""
    tools: Tools = ()
    call: ModelCall | None = None
    """The last turn of the policy."""
    begun: float = 0.0
    """When it had its first observation."""
    response: Response | None = None

    def __post_init__(self) -> None:
        # An episode that never began has no observation, and every pass reads at least one token.
        prompt = replace(self.prompt, token_ids=(0,))
        self.trajectory = Trajectory(prompt=prompt, sample_index=self.sample_index)


class Play:
    """The loop of one call: environments and model take turns, and neither waits for a single trajectory."""

    def __init__(self, arena: Arena, session: Session, on_finished: Callable[[Response], None]) -> None:
        assert arena.environments is not None, "this rank plays"
        self._environments, self._limits, self._clock = arena.environments, arena.limits, arena.clock
        self._renderer = arena.renderer
        self._session = session
        self._playing: dict[Hashable, Lane] = {}
        self._on_finished = on_finished
        self.times = PlayTimes()

    def begin(self, lanes: Sequence[Lane]) -> None:
        """Start all episodes, each with the row and the seed of its lane."""
        for lane in lanes:
            self._environments.start(lane.number, seed=lane.seed, row=lane.prompt.metadata)
            self._playing[lane.number] = lane

    @property
    def done(self) -> bool:
        """Whether every episode has ended."""
        return not self._playing

    def advance(self) -> None:
        """Take what environments answered, and decode one block of tokens."""
        decodes, begun = self._session.num_running > 0, self._clock()
        for number, answer in self._environments.poll(0.0 if decodes else WAIT_SECONDS):
            if (lane := self._playing.get(number)) is not None:
                self._take(lane, answer)
        polled = self._clock()
        self.times.waiting += 0.0 if decodes else polled - begun
        if self._session.num_running:
            calls = self._session.advance(WAIT_SECONDS)
            self.times.model += self._clock() - polled
            for call in calls:
                self._act(self._playing[call.request.lane], call)

    def close(self) -> None:
        """End the episodes that are left."""
        for lane in list(self._playing.values()):
            self._leave(lane.number)

    def _act(self, lane: Lane, call: ModelCall) -> None:
        """Give the environment what the policy wrote."""
        if call.finish is Finish.ABORTED:
            self._end(lane, Finish.ABORTED, failure="engine: it gave up a call of the policy")
            return
        assert lane.dialogue is not None, "the policy is asked after the first observation"
        text = lane.dialogue.turn_text(call.token_ids, call.finish)
        turn = parse(text, self._renderer.tool_style, lane.tools) if lane.tools else ToolTurn()
        lane.trajectory.add_call(call, text, turn.message(text))
        lane.call = call
        self._environments.step(lane.number, text)

    def _take(self, lane: Lane, answer: EnvironmentStep | EnvironmentFault) -> None:
        """Go on after the environment's answer, or end the trajectory."""
        if isinstance(answer, EnvironmentFault):
            self._end(lane, Finish.ABORTED, failure=f"{answer.kind}: {answer.reason}")
            return
        self.times.environments += answer.seconds
        try:
            if lane.call is None or lane.dialogue is None:
                self._observe_first(lane, answer)
            else:
                self._observe(lane, lane.dialogue, lane.call, answer)
        except DataError as error:  # the chat template refuses what the environment says
            self._end(lane, Finish.ABORTED, failure=f"invalid: {error}")

    def _observe(self, lane: Lane, dialogue: Dialogue, call: ModelCall, step: EnvironmentStep) -> None:
        """Go on after a turn, or end the trajectory, with what the policy would read next."""
        lane.trajectory.add_answer(step)
        if step.terminated:
            self._end(lane, Finish.TERMINATED)
            return
        dialogue.answered(call.token_ids, call.finish, step.observation)
        lane.trajectory.num_cut_observations = dialogue.num_cut_observations
        if not step.truncated and not self._is_over(lane, dialogue):
            self._ask(lane, dialogue)
            return
        if len(dialogue.prompt_ids) <= self._limits.max_tokens:
            lane.trajectory.add_prompt(dialogue.prompt_ids)
        self._end(lane, Finish.TRUNCATED if step.truncated else Finish.LENGTH)

    def _observe_first(self, lane: Lane, step: EnvironmentStep) -> None:
        lane.tools = step.info.get("tools") or ()
        lane.dialogue = dialogue = Dialogue(self._renderer, step.observation, tools=lane.tools)
        prompt_ids = dialogue.prompt_ids
        prompt = with_observation(lane.prompt, step.observation, prompt_ids)
        lane.begun = self._clock()
        lane.trajectory = Trajectory(prompt=prompt, sample_index=lane.sample_index, last=step)
        if len(prompt_ids) >= self._limits.max_tokens:
            limit = f"{len(prompt_ids)} tokens, and environment.max_tokens is {self._limits.max_tokens}"
            self._end(lane, Finish.ABORTED, failure=f"too_long: the first observation has {limit}")
        else:
            self._ask(lane, dialogue)

    def _is_over(self, lane: Lane, dialogue: Dialogue) -> bool:
        """Whether a limit of the run ends the trajectory after this turn."""
        limits = self._limits
        too_old = limits.max_seconds is not None and self._clock() - lane.begun > limits.max_seconds
        full = len(dialogue.prompt_ids) >= limits.max_tokens
        return too_old or full or len(lane.trajectory.turns) >= limits.max_turns

    def _ask(self, lane: Lane, dialogue: Dialogue) -> None:
        """Ask the policy for its next turn."""
        prompt_ids = dialogue.prompt_ids
        request = CallRequest(
            id=(lane.number, len(lane.trajectory.turns)),
            lane=lane.number,
            token_ids=prompt_ids,
            stream=lane.stream,
            first_position=lane.trajectory.num_drawn,
            max_new_tokens=min(lane.limit, self._limits.max_tokens - len(prompt_ids)),
        )
        self._session.submit(request)

    def _end(self, lane: Lane, finish: Finish, *, failure: str | None = None) -> None:
        lane.response = lane.trajectory.response(finish, failure=failure)
        self._leave(lane.number)
        self._on_finished(lane.response)

    def _leave(self, number: int) -> None:
        del self._playing[number]
        self._environments.stop(number)
        self._session.forget(number)


def _ignore(response: Response) -> None:
    del response
