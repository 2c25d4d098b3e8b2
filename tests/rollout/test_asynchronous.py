"""Sampling ahead of the learner: the bound, failures, the end, and what is measured. With an engine that obeys."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from proximo.errors import TrainingError
from proximo.records import Finish, Prompt, Response
from proximo.rollout import asynchronous
from proximo.rollout.asynchronous import AsyncRollouts, SamplingPlan
from proximo.rollout.engine import Holding
from proximo.rollout.sampling import RandomKey, SamplingOptions
from waiting import LATEST_SECONDS, wait_until

SIZE = 3
SAMPLES = 2


class Obedient:
    """Ends the responses to a prompt when the test says so. Each has the stream of its key as a token."""

    logprobs_are_the_learners = False
    max_logprob_error = None
    thread_safe = True

    def __init__(self) -> None:
        self.version = 0
        self.begun: dict[str, int] = {}
        """Prompt -> version of the weights when its responses began."""
        self.asked: list[str] = []
        self.allowed: set[str] | None = set()
        """Prompts whose responses may end; None for all."""
        self.changed = threading.Condition()
        self.failure: Exception | None = None

    def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self.version = version

    def holds(self) -> Holding | None:
        return None

    def stop(self) -> None:
        self.failure = TrainingError("stopped")
        self.let()

    def let(self, *names: str, everything: bool = False) -> None:
        with self.changed:
            if everything or self.allowed is None:
                self.allowed = None
            else:
                self.allowed |= set(names)
            self.changed.notify_all()

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int,
        options: SamplingOptions,
        key: RandomKey,
        on_finished: Callable[[Response], None] | None = None,
    ) -> list[Response]:
        with self.changed:
            for prompt in prompts:
                self.asked.append(prompt.id)
                self.begun[prompt.id] = self.version
        made: dict[str, list[Response]] = {}
        numbers = {prompt.id: index for index, prompt in enumerate(prompts)}
        waiting = list(prompts)
        while waiting:
            with self.changed:
                ready = self.changed.wait_for(lambda: self.failure or self._may(waiting), LATEST_SECONDS)
                assert ready, "the test lets every prompt end"
                if self.failure is not None:
                    raise self.failure
                prompt = next(p for p in waiting if self.allowed is None or p.id in self.allowed)
            waiting.remove(prompt)
            made[prompt.id] = [
                response(prompt, sample, key.stream(numbers[prompt.id], sample)) for sample in range(num_samples)
            ]
            for each in reversed(made[prompt.id]):
                if on_finished is not None:
                    on_finished(each)
        return [each for prompt in prompts for each in made[prompt.id]]

    def _may(self, waiting: Sequence[Prompt]) -> bool:
        return self.allowed is None or any(prompt.id in self.allowed for prompt in waiting)


def response(prompt: Prompt, sample: int, token: int) -> Response:
    return Response(
        prompt=prompt,
        sample_index=sample,
        token_ids=(token,),
        logprobs=torch.zeros(1),
        response_mask=torch.ones(1, dtype=torch.bool),
        finish=Finish.EOS,
        policy_version=0,
        text="",
    )


def name(step: int, index: int) -> str:
    return f"{step}.{index}"


def prompts_of(step: int) -> list[Prompt]:
    return [Prompt(id=name(step, index), token_ids=(1,)) for index in range(SIZE)]


def key_of(step: int) -> RandomKey:
    return RandomKey(seed=5, purpose="rollout", step=step)


def rollouts(engine: Obedient, staleness: int, num_steps: int = 20) -> AsyncRollouts:
    options = SamplingOptions(max_new_tokens=1)
    plan = SamplingPlan(options=options, num_samples=SAMPLES, key_of=key_of, num_steps=num_steps, staleness=staleness)
    return AsyncRollouts(engine, plan)


class Clock:
    """The seconds that sampling ahead measures. They pass where a test says so."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(asynchronous, "time", made)
    return made


def when_it_waits(ahead: AsyncRollouts, then: Callable[[Callable[[], bool]], None]) -> None:
    """Call `then`, once, where the learner begins to wait, with the condition for which it waits."""
    wait_for = ahead._changed.wait_for

    def waiting(holds: Callable[[], bool]) -> bool:
        ahead._changed.wait_for = wait_for  # type: ignore[method-assign]
        then(holds)
        return wait_for(holds)

    ahead._changed.wait_for = waiting  # type: ignore[method-assign]


def none_samples() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name == "rollouts"]


@pytest.mark.parametrize("staleness", [0, 1, 4, 8])
def test_a_step_gets_the_responses_to_its_own_prompts_under_its_own_key_within_the_bound(staleness: int) -> None:
    engine = Obedient()
    engine.let(everything=True)
    ahead, num_steps = rollouts(engine, staleness, num_steps=12), 12
    for step in range(num_steps):
        engine.version = step
        taken = ahead.take(step, prompts_of)
        assert [each.prompt.id for each in taken.responses[::SAMPLES]] == [name(step, i) for i in range(SIZE)]
        assert [each.token_ids[0] for each in taken.responses] == [
            key_of(step).stream(index, sample) for index in range(SIZE) for sample in range(SAMPLES)
        ]
        assert engine.begun[name(step, 0)] == max(0, step - staleness)
        wait_until(lambda: len(engine.asked) == min(step + staleness + 1, num_steps) * SIZE)  # noqa: B023 - at once
    ahead.close()


def test_a_step_waits_for_its_own_responses_while_those_of_later_steps_are_complete(clock: Clock) -> None:
    engine, ended = Obedient(), list[Response]()
    ahead = rollouts(engine, 2)

    def all_but_one_end(holds: Callable[[], bool]) -> None:
        engine.let(*(name(step, index) for step in (1, 2) for index in range(SIZE)), "0.0", "0.2")
        wait_until(lambda: sorted(ahead.complete()) == [1, 2] and len(ended) == 8 * SAMPLES)
        assert not holds()
        clock.seconds += 3
        engine.let("0.1")

    when_it_waits(ahead, all_but_one_end)
    assert ahead.take(0, prompts_of, on_finished=ended.append).waited_seconds == 3
    assert sorted(ahead.complete()) == [1, 2]
    ahead.close()


def test_after_a_resume_what_was_not_learned_from_begins_again_under_the_same_keys() -> None:
    engines = Obedient(), Obedient()
    for engine in engines:
        engine.let(everything=True)
    first, again = (rollouts(engine, 2) for engine in engines)
    kept = [first.take(step, prompts_of).responses for step in range(4)]
    first.close()
    assert again.take(2, prompts_of).responses == kept[2]
    assert again.take(3, prompts_of).responses == kept[3]
    again.close()


@pytest.mark.parametrize("fails", [0, 3])
def test_what_the_engine_raises_for_any_step_is_raised_where_the_learner_waits(fails: int) -> None:
    engine = Obedient()
    ahead = rollouts(engine, 4)
    generate = engine.generate

    def failing(prompts: Sequence[Prompt], **given: Any) -> list[Response]:
        if prompts[0].id == name(fails, 0):
            raise TrainingError("no usable response after 5 attempts")
        return generate(prompts, **given)

    engine.generate = failing
    with pytest.raises(TrainingError, match="no usable response"):
        ahead.take(0, prompts_of)
    ahead.close()


def test_closing_ends_the_threads_that_sample_and_a_later_take_begins_again() -> None:
    engine = Obedient()
    ahead = rollouts(engine, 4)
    engine.let(*(name(0, index) for index in range(SIZE)))
    ahead.take(0, prompts_of)
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rollouts"]
    engine.failure = None
    engine.let(everything=True)
    assert len(ahead.take(1, prompts_of).responses) == SIZE * SAMPLES
    ahead.close()


def test_a_thread_that_is_only_about_to_sample_when_the_run_ends_is_stopped_too() -> None:
    engine, stopped = Obedient(), threading.Event()
    generate, stop = engine.generate, engine.stop

    def late(prompts: Sequence[Prompt], **given: Any) -> list[Response]:
        assert stopped.wait(LATEST_SECONDS)
        engine.failure = None  # a stop ends the calls that are running, not later ones
        return generate(prompts, **given)

    def stop_and_tell() -> None:
        stop()
        stopped.set()

    engine.generate, engine.stop = late, stop_and_tell
    ahead = rollouts(engine, 1)
    ahead.put(0, [response(prompt, 0, 7) for prompt in prompts_of(0)])
    ahead.take(0, prompts_of)
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rollouts"]


def test_responses_are_announced_as_they_end_also_those_of_later_steps() -> None:
    seen: list[str] = []
    engine = Obedient()
    ahead = rollouts(engine, 1)
    engine.let("0.0", "0.1", "0.2", "1.0")
    ahead.take(0, prompts_of, on_finished=lambda each: seen.append(each.prompt.id))
    wait_until(lambda: len(seen) == 4 * SAMPLES)
    assert seen.count("1.0") == SAMPLES
    ahead.close()


def test_idle_time_and_the_learners_wait_are_measured(clock: Clock) -> None:
    engine = Obedient()
    engine.let(everything=True)
    ahead = rollouts(engine, 1)
    ahead.take(0, prompts_of)
    wait_until(none_samples)
    clock.seconds += 2
    engine.allowed = set()
    taken = ahead.take(1, prompts_of)
    assert (taken.seconds, taken.waited_seconds, taken.idle_seconds) == (2, 0, 2)

    def it_takes_three_seconds(_: object) -> None:
        wait_until(lambda: {"2.0", "3.0"} <= {*engine.asked})
        clock.seconds += 3
        engine.let(everything=True)

    when_it_waits(ahead, it_takes_three_seconds)
    taken = ahead.take(2, prompts_of)
    assert (taken.seconds, taken.waited_seconds, taken.idle_seconds) == (3, 3, 0)
    ahead.close()


def test_time_before_the_first_step_counts_for_nobody(clock: Clock) -> None:
    engine = Obedient()
    engine.let(everything=True)
    ahead = rollouts(engine, 1)
    for step in (0, 1):
        clock.seconds += 2
        taken = ahead.take(step, prompts_of)
        assert (taken.seconds, taken.idle_seconds) == (0, 0)
        ahead.close()
        engine.failure = None


def test_the_learners_wait_before_it_pushes_weights_counts_as_its_wait(clock: Clock) -> None:
    engine = Obedient()
    engine.let("0.0", "0.1", "0.2")
    ahead = rollouts(engine, 1)
    ahead.take(0, prompts_of)

    def it_takes_three_seconds(_: object) -> None:
        clock.seconds += 3
        engine.let(everything=True)

    when_it_waits(ahead, it_takes_three_seconds)
    ahead.settle()
    clock.seconds += 1
    taken = ahead.take(1, prompts_of)
    assert (taken.waited_seconds, taken.seconds) == (3, 4)
    assert ahead.take(2, prompts_of).waited_seconds == 0
    ahead.close()


def test_an_engine_that_does_not_stop_is_waited_for_so_long_and_no_longer(clock: Clock) -> None:
    engine = Obedient()
    ahead = rollouts(engine, 1)
    ahead.put(0, [response(prompt, 0, 7) for prompt in prompts_of(0)])
    ahead.take(0, prompts_of)
    seconds = iter((0.0, *[asynchronous.CLOSING_SECONDS - 1] * 3, asynchronous.CLOSING_SECONDS))
    clock.monotonic = lambda: next(seconds)  # type: ignore[method-assign]
    stops: list[int] = []

    def stop() -> None:
        stops.append(1)
        assert len(stops) <= 3

    engine.stop = stop  # type: ignore[method-assign]
    ahead.close()
    assert not none_samples()
    assert len(stops) == 3
    engine.let(everything=True)
    wait_until(none_samples)
