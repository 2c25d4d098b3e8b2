"""The loop of environments: limits, faults, seeds; and that no trajectory depends on the others."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from played_environments import Clock, FakeEngine, FakeEnvironments, FakeSession, NumberDialogue, arena, play, rows
from proximo.environments.engine import EnvironmentEngine
from proximo.errors import ConfigError, TrainingError
from proximo.records import Finish, Response


@pytest.fixture(autouse=True)
def _numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proximo.environments.engine.Dialogue", NumberDialogue)


@dataclass
class Counting:
    """Ends after a number of steps that depends on the seed, with a reward for each."""

    seed: int = 0
    steps: int = 0
    lengths: tuple[int, ...] = (1, 2, 3, 4)

    def reset(self, seed: int, row: Any) -> tuple[str, dict]:
        self.seed = seed
        return f"{seed % 7} {row['number']}", {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict]:
        self.steps += 1
        over = self.steps >= self.lengths[self.seed % len(self.lengths)]
        return f"{3 + self.steps}", float(len(text.split())), over, False, {"steps": self.steps}


@dataclass
class Scripted:
    """Answers what a test says."""

    answers: list[tuple[str, float, bool, bool, dict]] = field(default_factory=list)

    def reset(self, seed: int, row: Any) -> tuple[str, dict]:
        return "4", {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict]:
        return self.answers.pop(0)


def going_on(observation: str = "5") -> tuple[str, float, bool, bool, dict]:
    return observation, 1.0, False, False, {}


def engine(make: Callable[[], Any], *, session: FakeSession | None = None, **limits: Any) -> EnvironmentEngine:
    return EnvironmentEngine(FakeEngine(session or FakeSession()), arena(FakeEnvironments(make), **limits))


def facts(responses: list[Response]) -> list[Any]:
    return [(r.prompt, r.token_ids, r.response_mask.tolist(), r.finish, r.forks, r.episode.turns) for r in responses]


def test_all_samples_of_a_prompt_begin_alike_and_go_on_differently():
    environments = FakeEnvironments(Counting)
    played = EnvironmentEngine(FakeEngine(FakeSession()), arena(environments))
    responses = play(played, rows(2), num_samples=3)
    seeds = [seed for seed, _ in environments.starts]
    assert [r.prompt.id for r in responses] == ["row-0"] * 3 + ["row-1"] * 3
    assert [r.sample_index for r in responses] == [0, 1, 2, 0, 1, 2]
    assert len(set(seeds[:3])) == len(set(seeds[3:])) == 1
    assert seeds[0] != seeds[3]
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert environments.starts[3][1] == {"number": 1}
    assert len({r.token_ids for r in responses[:3]}) > 1
    assert {r.finish for r in responses} == {Finish.TERMINATED}
    assert responses[3].prompt.text == f"{seeds[3] % 7} 1"
    assert sorted(environments.stopped) == list(range(6))
    environments.close()


def test_samples_depend_neither_on_the_others_nor_on_the_speed_of_environments():
    alone = [play(engine(Counting), rows(6), num_samples=2)[index] for index in (3, 10)]
    clock = Clock()
    slow = FakeEnvironments(Counting, clock=clock, delay=lambda lane: 0.01 * ((lane * 7) % 5))
    session = FakeSession(clock=clock, seconds=0.004)
    together = play(EnvironmentEngine(FakeEngine(session), arena(slow)), rows(6), num_samples=2)
    assert facts([together[3], together[10]]) == facts(alone)


def test_a_trajectory_is_not_delayed_by_slow_environments_beside_it():
    """200 environments that take 2 s beside one that does not: it ends after as many passes as alone."""

    def passes(count: int) -> int:
        clock = Clock()
        environments = FakeEnvironments(Counting, clock=clock, delay=lambda lane: 2.0 if lane else 0.0)
        session = FakeSession(clock=clock, seconds=0.001)
        responses = play(EnvironmentEngine(FakeEngine(session), arena(environments)), rows(count))
        assert len(responses) == count
        assert len(responses[0].episode.turns) > 1
        return session.ended_at[0]

    assert passes(201) == passes(1)


def test_the_cache_of_a_lane_is_forgotten_when_its_trajectory_ends():
    session = FakeSession()
    play(engine(Counting, session=session), rows(3))
    assert sorted(session.forgotten) == [0, 1, 2]


def test_draws_go_on_where_the_turn_before_ended():
    session = FakeSession()
    (response,) = play(engine(lambda: Scripted([going_on()] * 9), session=session, max_turns=3), rows(1))
    drawn = [turn.end - turn.start for turn in response.episode.turns]
    assert [request.first_position for request in session.requests] == [0, drawn[0], drawn[0] + drawn[1]]
    assert len({request.stream for request in session.requests}) == 1


def test_a_limit_of_turns_ends_with_length_and_what_the_policy_would_read_next():
    (response,) = play(engine(lambda: Scripted([going_on()] * 9), max_turns=3), rows(1))
    assert (response.finish, len(response.episode.turns), response.episode.reward) == (Finish.LENGTH, 3, 3.0)
    assert response.token_ids[-1] == 5
    assert response.response_mask.tolist()[-1] is False
    assert not response.finish.terminated


def test_a_limit_of_tokens_bounds_every_call():
    session = FakeSession()
    (response,) = play(
        engine(lambda: Scripted([going_on()] * 99), session=session, max_turns=99, max_tokens=20), rows(1)
    )
    reads = [len(request.token_ids) + request.max_new_tokens for request in session.requests]
    assert response.finish is Finish.LENGTH
    assert max(reads) <= 20
    assert all(len(context) + len(tokens) <= 20 for context, tokens in response.sequences)
    assert max(request.max_new_tokens for request in session.requests) == 8


def test_an_old_trajectory_begins_no_further_turn():
    clock = Clock()
    environments = FakeEnvironments(lambda: Scripted([going_on()] * 9), clock=clock, delay=lambda _: 2.0)
    played = EnvironmentEngine(FakeEngine(FakeSession(clock=clock)), arena(environments, max_seconds=3.0))
    (response,) = play(played, rows(1))
    assert (response.finish, len(response.episode.turns)) == (Finish.LENGTH, 2)


@pytest.mark.parametrize("observation", ["6 7", "forget 6 7"])
def test_what_an_environment_cuts_keeps_its_last_observation(observation: str):
    script = [going_on("forget 5"), (observation, 1.0, False, True, {"why": "time"})]
    (response,) = play(engine(lambda: Scripted(list(script))), rows(1))
    context, tokens = response.sequences[-1]
    assert response.finish is Finish.TRUNCATED
    assert (*context, *tokens)[-2:] == (6, 7)
    assert len(response.forks) == (2 if "forget" in observation else 1)
    assert response.response_mask.sum() == sum(turn.end - turn.start for turn in response.episode.turns)


class Failing(Counting):
    def reset(self, seed: int, row: Any) -> tuple[str, dict]:
        if row["number"] == 1:
            raise RuntimeError("no board")
        return super().reset(seed, row)

    def step(self, text: str) -> tuple[str, float, bool, bool, dict]:
        if self.steps == 1 and self.seed % 2:
            raise RuntimeError("lost")
        return super().step(text)


def test_a_fault_ends_its_trajectory_alone():
    responses = play(engine(Failing), rows(12))
    failed = {r.episode.failure for r in responses if r.finish is Finish.ABORTED}
    assert failed == {"error: no board", "error: lost"}
    assert responses[1].token_ids == ()
    assert len(responses[1].prompt.token_ids) == 1
    unharmed = play(engine(Counting), rows(12))
    kept = [i for i, r in enumerate(responses) if r.finish is not Finish.ABORTED]
    assert 0 < len(kept) < 11
    assert facts([responses[i] for i in kept]) == facts([unharmed[i] for i in kept])


def test_a_first_observation_that_fills_the_conversation_is_a_fault():
    (response,) = play(engine(Counting, max_tokens=3), rows(1))
    assert response.episode.failure == "too_long: the first observation has 3 tokens, and environment.max_tokens is 3"
    assert response.finish is Finish.ABORTED


def test_responses_are_handed_on_as_they_end():
    ended: list[Response] = []
    session = FakeSession()
    responses = play(engine(Counting, session=session), rows(5), on_finished=ended.append)
    lanes = [next(lane for lane, each in enumerate(responses) if each is response) for response in ended]
    assert sorted(lanes) == [0, 1, 2, 3, 4]
    assert [session.ended_at[lane] for lane in lanes] == sorted(session.ended_at.values())


def test_a_stop_from_another_thread_ends_the_episodes():
    environments = FakeEnvironments(Counting)
    played = EnvironmentEngine(FakeEngine(FakeSession()), arena(environments))

    class Stopping(Counting):
        def step(self, text: str) -> tuple[str, float, bool, bool, dict]:
            played.stop()
            return super().step(text)

    environments.make = Stopping
    with pytest.raises(TrainingError, match="stopped"):
        play(played, rows(2))
    environments.close()


def test_prompts_with_ids_are_answered_plainly():
    assert play(engine(Counting), [replace(rows(1)[0], token_ids=(3,))]) == ["plain row-0"]


def test_an_engine_without_sessions_is_refused():
    class Plain:
        pass

    with pytest.raises(ConfigError, match="Plain has no method session"):
        EnvironmentEngine(Plain(), arena(FakeEnvironments(Counting)))


def test_the_time_is_that_of_the_model_or_of_waiting():
    clock = Clock()
    environments = FakeEnvironments(Counting, clock=clock, delay=lambda _: 2.0)
    played = EnvironmentEngine(FakeEngine(FakeSession(clock=clock, seconds=0.25)), arena(environments))
    play(played, rows(1))
    values = {name: value.value for name, value in played.statistics().items()}
    assert values["environment/model_seconds"] + values["environment/waiting_seconds"] == pytest.approx(clock.now)
    assert values["environment/waiting_seconds"] >= 2.0
    assert played.statistics()["environment/model_seconds"].value == 0.0
