"""The graph finds its order and refuses what cannot run; the executor hands values on."""

from types import SimpleNamespace

import pytest

from proximo.dataflow import executor
from proximo.dataflow.executor import LocalExecutor
from proximo.dataflow.graph import Call, build_graph

SAMPLE = Call(name="sample", role="policy", reads=("prompts",), writes=("responses",))
SCORE = Call(name="score", role="reward", reads=("responses",), writes=("scores",))
LEARN = Call(name="learn", role="policy", reads=("responses", "scores"), writes=("loss", "norm"))


def test_calls_run_after_what_they_read_was_written() -> None:
    graph = build_graph([LEARN, SCORE, SAMPLE], inputs=["prompts"])
    assert [call.name for call in graph.calls] == ["sample", "score", "learn"]


def test_calls_that_are_ready_keep_their_order() -> None:
    other = Call(name="other", role=None, reads=("prompts",), writes=("x",))
    assert [call.name for call in build_graph([other, SAMPLE], inputs=["prompts"]).calls] == ["other", "sample"]
    assert [call.name for call in build_graph([SAMPLE, other], inputs=["prompts"]).calls] == ["sample", "other"]


def test_what_a_call_amends_reaches_the_readers_when_all_have_amended_it_in_their_order() -> None:
    clip = Call(name="clip", role=None, reads=("scores",), writes=("scores",))
    bonus = Call(name="bonus", role=None, reads=("responses", "scores"), writes=("scores",))
    graph = build_graph([LEARN, clip, bonus, SCORE, SAMPLE], inputs=["prompts"])
    assert [call.name for call in graph.calls] == ["sample", "score", "clip", "bonus", "learn"]
    turned = build_graph([LEARN, bonus, clip], inputs=["responses", "scores"])
    assert [call.name for call in turned.calls] == ["bonus", "clip", "learn"]
    handlers = {
        "clip": lambda scores: (min(scores, 1),),
        "bonus": lambda responses, scores: (scores + 10,),
        "learn": lambda responses, scores: (scores, None),
    }
    assert LocalExecutor(turned, handlers).run({"responses": 0, "scores": 5}).values["loss"] == 1


def test_calls_run_together_where_they_may_and_need_nothing_of_each_other() -> None:
    other = Call(name="other", role=None, reads=("responses",), writes=("x",))
    third = Call(name="third", role=None, reads=("x",), writes=("y",))
    graph = build_graph([SAMPLE, SCORE, other, third], inputs=["prompts"])
    handlers = {call.name: lambda given: (given,) for call in graph.calls}
    groups: list[int] = []

    def run_all(functions):
        groups.append(len(functions))
        return [function() for function in functions]

    def ran(*names: str) -> list[int]:
        groups.clear()
        outcome = LocalExecutor(graph, handlers, together=names, side_by_side=run_all).run({"prompts": 1})
        assert outcome.values["y"] == 1
        assert list(outcome.seconds) == ["sample", "score", "other", "third"]
        return list(groups)

    assert ran("score", "other") == [2]
    assert ran("other", "third") == [], "the second reads what the first writes"
    assert ran("score", "third") == [], "one of them is ready too late to be next"
    assert ran("score", "other", "third") == [2]


def test_calls_side_by_side_divide_the_time_that_they_took_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of their own: at the same time they take as long as the longer one."""
    calls = [Call(name=name, role=None, reads=("x",), writes=(name,)) for name in ("short", "long")]
    takes = {"short": 1.0, "long": 3.0}
    now = [0.0]
    monkeypatch.setattr(executor, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def handler(name: str):
        def handle(_: object) -> tuple[None]:
            now[0] += takes[name]
            return (None,)

        return handle

    def at_once(functions):
        start, ends, found = now[0], [], []
        for function in functions:
            now[0] = start
            found.append(function())
            ends.append(now[0])
        now[0] = max(ends)
        return found

    handlers = {name: handler(name) for name in takes}
    made = LocalExecutor(build_graph(calls, inputs=["x"]), handlers, together=takes, side_by_side=at_once)
    assert made.run({"x": None}).seconds == {"short": 0.75, "long": 2.25}


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([SCORE], "score.*responses"),
        ([SAMPLE, SAMPLE], "more than once: sample"),
        ([SAMPLE, Call(name="again", role=None, reads=(), writes=("responses",))], "more than once: responses"),
        (
            [
                Call(name="a", role=None, reads=("y",), writes=("x",)),
                Call(name="b", role=None, reads=("x",), writes=("y",)),
            ],
            "no call can run next",
        ),
        (
            [SAMPLE, SCORE, LEARN, Call(name="late", role=None, reads=("loss", "scores"), writes=("scores",))],
            "no call can run next.*'late': ..loss",
        ),
    ],
)
def test_a_graph_that_cannot_run_is_refused(calls: list[Call], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_graph(calls, inputs=["prompts"])


def test_the_executor_hands_values_from_call_to_call() -> None:
    handlers = {
        "sample": lambda prompts: ([p * 2 for p in prompts],),
        "score": lambda responses: (sum(responses),),
        "learn": lambda responses, scores: (scores / len(responses), 1.0),
    }
    outcome = LocalExecutor(build_graph([SAMPLE, SCORE, LEARN], inputs=["prompts"]), handlers).run({"prompts": [1, 2]})
    assert outcome.values["loss"] == 3.0
    assert list(outcome.seconds) == ["sample", "score", "learn"]


def test_the_executor_refuses_wrong_inputs_handlers_and_counts() -> None:
    graph = build_graph([SAMPLE], inputs=["prompts"])
    with pytest.raises(ValueError, match="without a handler: sample"):
        LocalExecutor(graph, {})
    with pytest.raises(ValueError, match="takes"):
        LocalExecutor(graph, {"sample": lambda p: (p,)}).run({"questions": 1})
    with pytest.raises(ValueError, match="returned 2 values"):
        LocalExecutor(graph, {"sample": lambda p: (p, p)}).run({"prompts": 1})
