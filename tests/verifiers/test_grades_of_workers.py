"""Grades through workers: what is remembered, what becomes of what a verifier says, and of what it does not."""

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pool_clock import PoolClock, hangs
from proximo_verifiers import grader
from proximo_verifiers.grader import Grader
from proximo_verifiers.verifier import Answer, Finish, ScoreState
from proximo_verifiers.workers import loop, pool, process


@contextmanager
def made(verifier: str, *, options: Any = None, **settings: Any) -> Iterator[Grader]:
    settings = {"num_workers": 1, "answer_seconds": 60.0, **settings}
    with Grader(f"example_verifiers:{verifier}", options, name="j", **settings) as source:
        yield source


def texts(*given: str) -> list[Answer]:
    return [Answer(text=text) for text in given]


def test_grades_keep_the_order_of_the_responses_and_their_components() -> None:
    given = [f"{'a' * (n % 7)}{n}" for n in range(300)]
    with made("Letters", num_workers=3, options={"letter": "a"}) as source:
        found = source.grade(texts(*given))
    assert [each.score for each in found] == [text.count("a") / (len(text) + 1) for text in given]
    assert [dict(each.components) for each in found] == [{"length": float(len(text))} for text in given]


def test_a_verifier_may_say_that_it_does_not_apply() -> None:
    with made("LettersAlone") as source:
        digit, letter = source.grade(texts("a1", "a"))
        counts = source.take_counts()
    assert (digit.state, repr(digit.score), digit.reason) == (ScoreState.NOT_APPLICABLE, "nan", "there is a digit")
    assert (letter.state, letter.score) == (ScoreState.SCORED, 0.5)
    assert (counts.num_failures, counts.num_retries) == (0, 0)


def test_an_answer_is_graded_once_in_a_run_however_often_it_comes(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    with made("Letters", options={"seen": str(seen)}) as source:
        source.grade(texts("x", "y", "x"))
        assert source.take_counts().num_cache_hits == 1
        others = [Answer(text="x", metadata={"level": 2}), Answer(text="x", finish=Finish.LENGTH)]
        source.grade([*texts("x", "z"), *others])
        assert source.take_counts().num_cache_hits == 1
    # What a grade depends on is told apart: the row, and how the response ended.
    assert [json.loads(line) for line in seen.read_text().splitlines()] == ["x", "y", "z", "x", "x"]


def test_only_so_many_grades_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grader, "MAX_CACHED", 2)
    seen = tmp_path / "seen"
    with made("Letters", options={"seen": str(seen)}) as source:
        source.grade(texts("x", "y"))
        source.grade(texts("x", "z"))
        source.grade(texts("x", "y"))
    assert [json.loads(line) for line in seen.read_text().splitlines()] == ["x", "y", "z", "y"]


def test_what_was_begun_is_collected_and_graded_once(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    given = texts("x", "y", "x")
    with made("Letters", options={"seen": str(seen)}) as source:
        for each in given:
            source.begin(each)
        source.begin(Answer(text="never asked about"))
        assert [found.score for found in source.grade(given)] == [0.0, 0.0, 0.0]
        source.grade(texts("never asked about"))
    assert sorted(json.loads(line) for line in seen.read_text().splitlines()) == ["never asked about", "x", "y"]


@pytest.mark.parametrize("by_clock", [False, True])
def test_what_is_begun_for_a_later_step_is_graded_once_and_is_no_cache_hit(tmp_path: Path, by_clock: bool) -> None:
    """As with asynchronous rollouts: its grade is there before the step is scored that it belongs to."""
    seen = tmp_path / "seen"
    with made("Letters", options={"seen": str(seen), "by_clock": by_clock}) as source:
        source.begin(Answer(text="later"))
        source.grade(texts("now"))
        source.take_counts()
        source.grade(texts("later"))
        assert source.take_counts().num_cache_hits == 0
    assert sorted(json.loads(line) for line in seen.read_text().splitlines()) == ["later", "now"]


def test_only_so_much_is_begun_that_nobody_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grader, "MAX_CACHED", 2)
    with made("Letters", options={"seen": str(tmp_path / "seen")}) as source:
        for text in ("x", "y", "z"):
            source.begin(Answer(text=text))
        assert len(source._started) == 2


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """Where workers write a byte before they hang."""
    return tmp_path / "begun"


def passes_with(monkeypatch: pytest.MonkeyPatch, place: Path, *times: int) -> None:
    """The limit of an answer is over whenever workers have hung so many times."""
    clock = PoolClock(*((hangs(place, each), 61.0) for each in times))
    for module in (loop, process):
        monkeypatch.setattr(module, "time", clock)


def test_a_time_out_is_the_answers_fault_with_the_score_that_the_verifier_wants(
    begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes_with(monkeypatch, begun, 2, 4)
    with made("Hostile", num_workers=2, options={"begun": str(begun)}) as source:
        found = source.grade(texts("sleep", "spin", "fine"))
        counts = source.take_counts()
    assert [(each.score, each.state) for each in found] == [
        (-0.5, ScoreState.MODEL_FAULT),
        (-0.5, ScoreState.MODEL_FAULT),
        (4.0, ScoreState.SCORED),
    ]
    assert [dict(each.components) for each in found] == [{"part": 0.0}, {"part": 0.0}, {}]
    assert found[0].reason == "not graded within answer_seconds = 60, twice"
    assert (counts.num_timeouts, counts.num_model_faults, counts.num_failures) == (2, 2, 0)
    assert (max(counts.seconds), counts.num_retries, counts.num_restarts) == (60, 2, 4)


def test_each_response_that_timed_out_is_counted_as_each_that_is_at_fault(
    begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes_with(monkeypatch, begun, 1, 2, 3, 4)
    with made("Hostile", options={"begun": str(begun)}) as source:
        for _ in range(2):
            source.grade(texts("sleep", "sleep", "fine"))
            counts = source.take_counts()
            assert counts.num_timeouts == counts.num_model_faults == 2


def test_an_answer_that_timed_out_before_the_step_did_is_at_fault_and_one_never_tried_is_not(
    begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes_with(monkeypatch, begun, 1)
    monkeypatch.setattr(pool, "time", PoolClock((hangs(begun, 2), 600.0)))
    monkeypatch.setattr(pool, "LOG_EVERY_SECONDS", 0.1)  # so often it looks at its clock
    given = [Answer(text="sleep", metadata={"n": n}) for n in range(4)]
    with made("Hostile", options={"begun": str(begun)}) as source:
        found = source.grade(given)
        counts = source.take_counts()
    first, last = found[0], found[-1]
    assert (first.score, first.state, dict(first.components)) == (-0.5, ScoreState.MODEL_FAULT, {"part": 0.0})
    assert first.reason == "not graded within answer_seconds = 60, and not again before step_seconds were over"
    assert (last.state, last.reason) == (ScoreState.INFRASTRUCTURE_FAULT, "not graded within step_seconds = 600")
    assert counts.num_timeouts == counts.num_model_faults == 1


def test_what_the_clock_decided_is_graded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes_with(monkeypatch, tmp_path / "1000", 1, 2)
    with made("Slow", options={"folder": str(tmp_path), "times": 2}) as source:
        (late,) = source.grade(texts("1000"))
        source.take_counts()
        (in_time,) = source.grade(texts("1000"))
        assert source.take_counts().num_cache_hits == 0
    assert (late.score, late.state) == (0.0, ScoreState.MODEL_FAULT)
    assert (in_time.score, in_time.state) == (1.0, ScoreState.SCORED)


def test_a_grade_of_which_the_verifier_says_that_the_clock_decided_is_not_remembered(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    with made("Letters", options={"seen": str(seen), "by_clock": True}) as source:
        source.grade(texts("x", "x"))
        source.begin(Answer(text="x"))
        source.grade(texts("x"))
    assert len(seen.read_text().splitlines()) == 2


def test_a_verifier_without_a_grade_for_time_outs_gives_them_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with made("Slow", options={"folder": str(tmp_path / "nowhere")}, attempts=1) as source:
        (fault,) = source.grade(texts("1000"))
    assert fault.state is ScoreState.INFRASTRUCTURE_FAULT, "a folder that is not there is nobody's slow answer"
    passes_with(monkeypatch, tmp_path / "1000", 1)
    with made("Slow", options={"folder": str(tmp_path)}) as source:
        (second_try,) = source.grade(texts("1000"))
    assert (second_try.score, second_try.state) == (1.0, ScoreState.SCORED), "in time at the second try"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise", "ValueError: no"),
        ("mumble", "ValueError: half a pair: ?"),
        ("exit", "SystemExit: 4"),
        ("die", "its worker ended with status 3"),
        ("abort", "its worker was ended by SIGABRT"),
        ("eat", "MemoryError:"),
        ("recurse", "RecursionError: maximum recursion depth exceeded"),
        ("close", "its worker"),
        ("garble", "its worker sent an invalid reply"),
        ("announce", "its worker sent an invalid reply"),
        ("leave_a_child_and_die", "its worker"),
    ],
)
def test_what_a_verifier_does_to_its_worker_is_no_score_and_harms_no_other_answer(text: str, reason: str) -> None:
    with made("Hostile", memory_bytes=2**28, attempts=2) as source:
        found = source.grade(texts("before", text, "after it"))
        counts = source.take_counts()
    assert [each.score for each in found[::2]] == [6.0, 8.0]
    assert found[1].state is ScoreState.INFRASTRUCTURE_FAULT
    assert math.isnan(found[1].score)
    assert (found[1].reason or "").startswith(reason)
    assert (counts.num_failures, counts.num_retries) == (1, 1)


@pytest.mark.parametrize("text", ["flood", "read", "fork", "leave_a_child"])
def test_what_a_verifier_does_beside_grading_does_not_reach_the_trainer(text: str, capfd: Any) -> None:
    with made("Hostile") as source:
        found = source.grade(texts(text, "after it", text))
    assert [each.score for each in found] == [float(len(text)), 8.0, float(len(text))]
    assert capfd.readouterr() == ("", "")


def test_a_fault_that_the_verifier_itself_sees_is_tried_again_and_not_remembered() -> None:
    with made("OfNoUse", attempts=3) as source:
        (found,) = source.grade(texts("x"))
        counts = source.take_counts()
        source.grade(texts("x"))
        assert source.take_counts().num_cache_hits == 0
        (other,) = source.grade(texts("nan"))
    assert (found.state, found.reason) == (ScoreState.INFRASTRUCTURE_FAULT, "the other machine is down")
    assert counts.num_retries == 2
    assert other.reason == "ValueError: the verifier said scored with a score of nan"


def test_an_answer_whose_worker_died_is_tried_again(tmp_path: Path) -> None:
    with made("Flaky", num_workers=2, options={"folder": str(tmp_path)}, attempts=2) as source:
        found = source.grade(texts(*map(str, range(20))))
        counts = source.take_counts()
    assert [each.score for each in found] == [1.0] * 20
    assert counts.num_retries == counts.num_restarts == 20


def test_what_is_not_graded_when_the_step_must_end_has_no_score_and_the_next_step_goes_on(
    begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "time", PoolClock((hangs(begun, 1), 600.0)))
    monkeypatch.setattr(pool, "LOG_EVERY_SECONDS", 0.1)
    with made("Hostile", answer_seconds=300, options={"begun": str(begun)}) as source:
        found = source.grade(texts("fine", "sleep", "well"))
        assert [each.state for each in found[1:]] == [ScoreState.INFRASTRUCTURE_FAULT] * 2
        assert found[0].score == 4.0
        assert found[2].reason == "not graded within step_seconds = 600"
        assert [each.score for each in source.grade(texts("well"))] == [4.0]


def test_several_threads_may_ask_at_once(tmp_path: Path) -> None:
    found: dict[int, list[float]] = {}
    with made("Letters", num_workers=2) as source:

        def ask(thread: int) -> None:
            found[thread] = [each.score for each in source.grade(texts(*(f"a{n}" for n in range(200))))]

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert list(found.values()) == [[1 / (len(f"a{n}") + 1) for n in range(200)]] * 4


def test_a_verifier_that_returns_no_grade_is_told_so() -> None:
    with made("Wordless") as source:
        (scored,) = source.grade(texts("x"))
    assert not scored.state.has_score
    assert "must return a Grade, it returned None" in str(scored.reason)


def test_answers_of_later_steps_change_nothing_for_those_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is right at its second try, alone in a worker. It comes before one that nobody waits for yet."""
    wanted, want = threading.Event(), loop.WorkerLoop.want

    def note(self: loop.WorkerLoop, work: Any) -> None:
        want(self, work)
        wanted.set()

    monkeypatch.setattr(loop.WorkerLoop, "want", note)
    hung = hangs(tmp_path / "1000", 1)
    monkeypatch.setattr(loop, "time", PoolClock((lambda: wanted.is_set() and hung(), 61.0)))
    monkeypatch.setattr(pool, "time", PoolClock((hangs(tmp_path / "2000", 1), 600.0)))
    with made("Slow", options={"folder": str(tmp_path)}) as source:
        source.begin(Answer(text="1000"))
        source.begin(Answer(text="2000"))
        (scored,) = source.grade(texts("1000"))
    assert (scored.score, scored.state) == (1.0, ScoreState.SCORED)


def test_answers_that_make_their_verifier_wait_come_after_all_others(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    with made("Waiting", options={"seen": str(seen)}) as source:
        found = source.grade(texts("z1", "a", "z2", "aa", "a1"))
    assert [json.loads(line) for line in seen.read_text().splitlines()] == ["z1", "a", "z2", "aa", "a1", "z1", "z2"]
    assert {each.state for each in found} == {ScoreState.SCORED}


def test_an_answer_that_gave_up_its_turn_is_at_fault_where_there_is_no_time_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step ends in the second turn of the first one."""
    seen = tmp_path / "seen"
    monkeypatch.setattr(pool, "time", PoolClock((lambda: seen.exists() and seen.read_text().count("\n") == 4, 600.0)))
    monkeypatch.setattr(pool, "LOG_EVERY_SECONDS", 0.1)  # so often it looks at its clock
    with made("Waiting", options={"seen": str(seen)}, answer_seconds=600.0) as source:
        found = source.grade(texts("z" * 400, "z" * 401, "a"))
    assert [each.state for each in found] == [ScoreState.MODEL_FAULT, ScoreState.MODEL_FAULT, ScoreState.SCORED]
    reason = "idle for longer than a first turn, and had no second turn before step_seconds were over"
    assert {each.reason for each in found[:2]} == {reason}
