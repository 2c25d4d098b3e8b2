"""The graph finds its order and refuses what cannot run; the executor hands values on."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from proximo.dataflow import executor
from proximo.dataflow.executor import Handler, LocalExecutor, Outcome
from proximo.dataflow.graph import Call, Graph, build_graph
from proximo.errors import ConfigError

SAMPLE = Call(name="sample", role="policy", reads=("prompts",), writes=("responses",))
SCORE = Call(name="score", role="reward", reads=("responses",), writes=("scores",))
LEARN = Call(name="learn", role="policy", reads=("responses", "scores"), writes=("loss", "norm"))


def run(
    graph: Graph, inputs: dict[str, Any], handlers: dict[str, Handler], *, side_by_side: Any = None, **options: Any
) -> Outcome:
    """With all calls of all roles, and those of the driver, handled by these."""
    worker = SimpleNamespace(handlers=handlers)
    groups = [dict.fromkeys(("policy", "reward"), worker)]
    return LocalExecutor(side_by_side=side_by_side).run(graph, inputs, groups=groups, driver=handlers, **options)


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
    assert run(turned, {"responses": 0, "scores": 5}, handlers).values["loss"] == 1


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
        outcome = run(graph, {"prompts": 1}, handlers, side_by_side=run_all, together=names)
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
    outcome = run(build_graph(calls, inputs=["x"]), {"x": None}, handlers, side_by_side=at_once, together=takes)
    assert outcome.seconds == {"short": 0.75, "long": 2.25}


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
    outcome = run(build_graph([SAMPLE, SCORE, LEARN], inputs=["prompts"]), {"prompts": [1, 2]}, handlers)
    assert outcome.values["loss"] == 3.0
    assert list(outcome.seconds) == ["sample", "score", "learn"]


def test_a_call_runs_at_the_worker_of_its_role_and_one_without_a_role_in_the_driver() -> None:
    def group_of(*roles: str) -> dict[str, Any]:
        return {
            role: SimpleNamespace(handlers=dict.fromkeys(("work", "rest"), lambda x, role=role: (role,)))
            for role in roles
        }

    calls = [
        Call(name="work", role="value", reads=("x",), writes=("a",)),
        Call(name="rest", role="policy", reads=("x",), writes=("b",)),
        Call(name="own", role=None, reads=("x",), writes=("c",)),
    ]
    own = {"own": lambda x: (x,), "work": lambda x: ("the driver",)}
    graph = build_graph(calls, inputs=["x"])
    found = LocalExecutor().run(graph, {"x": "given"}, groups=[group_of("policy"), group_of("value")], driver=own)
    assert found.values == {"x": "given", "a": "value", "b": "policy", "c": "given"}


def test_a_call_that_needs_two_roles_gets_both_of_one_group_and_is_refused_where_they_are_apart() -> None:
    policy = SimpleNamespace(handlers={})
    reference = SimpleNamespace(handlers={"compare": lambda x, *, policy: ((x, policy),)})
    ran: list[int] = []
    first = Call(name="first", role=None, reads=("x",), writes=("y",))
    compare = Call(name="compare", role="reference", reads=("y",), writes=("kl",), beside=("policy",))
    graph, own = build_graph([first, compare], inputs=["x"]), {"first": lambda x: (ran.append(x) or x,)}
    both = [{"reward": policy}, {"policy": policy, "reference": reference}]
    assert LocalExecutor().run(graph, {"x": 1}, groups=both, driver=own).values["kl"] == (1, policy)
    ran.clear()
    apart = [{"policy": policy}, {"reference": reference}]
    with pytest.raises(
        ConfigError, match="compare needs the models of reference and policy at once, but policy is in an"
    ):
        LocalExecutor().run(graph, {"x": 1}, groups=apart, driver=own)
    assert not ran, "it is known before anything runs"


def test_around_is_entered_for_each_call_by_itself() -> None:
    seen: list[str] = []

    @contextmanager
    def around(call: Call) -> Iterator[None]:
        seen.append(f"{call.name} begins")
        yield
        seen.append(f"{call.name} ended")

    run(
        build_graph([SAMPLE, SCORE], inputs=["prompts"]),
        {"prompts": 1},
        {name: lambda x: (x,) for name in ("sample", "score")},
        around=around,
    )
    assert seen == ["sample begins", "sample ended", "score begins", "score ended"]


def test_the_executor_refuses_wrong_inputs_handlers_and_counts() -> None:
    graph = build_graph([SAMPLE], inputs=["prompts"])
    with pytest.raises(ValueError, match="no worker of the role policy handles the call sample"):
        run(graph, {"prompts": 1}, {})
    with pytest.raises(ValueError, match="no worker of the role policy handles the call sample"):
        LocalExecutor().run(graph, {"prompts": 1}, groups=[], driver={"sample": lambda p: (p,)})
    alone = build_graph([Call(name="own", role=None, reads=(), writes=())], inputs=[])
    with pytest.raises(ValueError, match="own has no role, and the driver no handler"):
        run(alone, {}, {})
    with pytest.raises(ValueError, match="takes"):
        run(graph, {"questions": 1}, {"sample": lambda p: (p,)})
    with pytest.raises(ValueError, match="returned 2 values"):
        run(graph, {"prompts": 1}, {"sample": lambda p: (p, p)})
