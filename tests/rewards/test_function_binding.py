"""A reward function gets what its parameters name, in our form and in TRL's; what cannot be bound is refused first."""

import asyncio
import functools
import operator
import threading
from collections.abc import Callable
from typing import Any

import pytest

from builders import tiny_tokenizer
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.rows import Row
from proximo.errors import ConfigError, DataError, TrainingError
from proximo.records import Response, ScoreState
from proximo.rewards import function_binding
from proximo.rewards.function import FunctionReward
from proximo.rewards.protocol import read_reply, reply_body
from proximo.rewards.weighted import WeightedReward
from records_made import prompt, response
from waiting import LATEST_SECONDS

TEXT = prompt(text="2+2?", answer="4", metadata={"level": 3, "tests": ["a"]})
CHAT = prompt(text=None, messages=({"role": "user", "content": "2+2?"},), answer="4", metadata={"level": 3})


def of(to: Any = TEXT) -> list[Response]:
    return [response(to=to, text="it is 4"), response(to=to, text="five")]


def scores(function: Callable[..., Any], to: Any = TEXT, **options: Any) -> list[float]:
    return [each.score for each in FunctionReward(function, **options).score(of(to))]


def right(prompts, completions, answer, **kwargs):
    return [float(a in c) for a, c in zip(answer, completions, strict=True)]


class Grader:
    def __call__(self, completions, answer, **kwargs):
        return right(None, completions, answer)

    def method(self, answer, completions):
        return right(None, completions, answer)

    @staticmethod
    def apart(completions, /, *, answer):
        return right(None, completions, answer)


async def later(completions, answer, **kwargs):
    await asyncio.sleep(0)
    return right(None, completions, answer)


@functools.wraps(right)
def named_wrapper(*args, **kwargs):
    return right(*args, **kwargs)


class Later:
    async def __call__(self, completions, answer):
        return await later(completions, answer)


FORMS = {
    "trl": right,
    "completions and columns": lambda completions, answer, **kwargs: right(None, completions, answer),
    "another order": lambda answer, completions: right(None, completions, answer),
    "all by keywords": lambda **kwargs: right(None, kwargs["completions"], kwargs["answer"]),
    "our own": lambda prompts, responses, metadata: right(None, responses, [each["answer"] for each in metadata]),
    "our own in another order": lambda metadata, responses: right(None, responses, [m["answer"] for m in metadata]),
    "our own beside a column": lambda responses, answer: right(None, responses, answer),
    "an object": Grader(),
    "a method": Grader().method,
    "a method with positional and keyword parameters": Grader().apart,
    "a partial": functools.partial(lambda completions, answer, by: right(None, completions, answer), by=2),
    "a wrapper": named_wrapper,
    "an async function": later,
    "an async object": Later(),
    "a partial of an async function": functools.partial(later, more=1),
    "what returns a coroutine": lambda completions, answer: later(completions, answer=answer),
    "a default that a column replaces": lambda completions, answer=None: right(None, completions, answer),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gets_what_its_parameters_name(form: str) -> None:
    assert scores(FORMS[form]) == [1.0, 0.0]


def test_everything_of_a_batch_and_every_column_has_a_name() -> None:
    seen: dict[str, Any] = {}

    def look(prompts, completions, completion_ids, *, responses, metadata, level, finish, bonus, tests=None, no=7):
        seen.update(locals())
        return [0.0] * len(prompts)

    scores(look, kwargs={"bonus": 2})
    facts = {"answer": "4", "level": 3, "tests": ["a"], "finish": "eos", "token_ids": (7, 8, 2)}
    assert {key: value for key, value in seen.items() if key != "seen"} == {
        "prompts": ["2+2?"] * 2,
        "responses": ["it is 4", "five"],
        "completions": ["it is 4", "five"],
        "completion_ids": [[7, 8, 2]] * 2,
        "metadata": [facts] * 2,
        "level": [3, 3],
        "finish": ["eos"] * 2,
        "bonus": 2,
        "tests": [["a"]] * 2,
        "no": 7,
    }


def test_further_keywords_are_those_of_trl() -> None:
    seen: dict[str, Any] = {}

    def look(completions, **kwargs):
        seen.update(kwargs)
        return [0.0] * len(completions)

    scores(look, kwargs={"bonus": 2, "level": "given"})
    assert set(seen) == {"prompts", "completion_ids", "answer", "level", "tests", "finish", "token_ids", "bonus"}
    assert seen["level"] == "given"
    scores(look, prompt(metadata={"metadata": 5, "responses": 6}))
    assert (seen["metadata"], seen["responses"]) == ([5, 5], [6, 6])


def test_a_conversation_is_answered_by_messages() -> None:
    def graded(prompts, completions, answer, **kwargs):
        assert [asked[-1]["content"] for asked in prompts] == ["2+2?"] * 2
        assert [list(answered[0]) for answered in completions] == [["role", "content"]] * 2
        return right(None, [answered[0]["content"] for answered in completions], answer)

    assert scores(graded, CHAT) == [1.0, 0.0]


def test_what_a_partial_sets_stays() -> None:
    def level_is(completions, level, **kwargs):
        return [float(level == 9)] * len(completions)

    assert scores(functools.partial(level_is, level=9)) == [1.0, 1.0]
    assert scores(lambda completions, level: [float(each) for each in level]) == [3.0, 3.0]


def test_an_answer_that_is_a_number_is_one_as_a_column_and_text_as_the_reference_answer() -> None:
    (row,) = [Row(source="rows.jsonl", number=1, values={"prompt": "2+2?", "answer": 4})]
    ((asked, *_), _) = load_prompts([row], tiny_tokenizer(), PromptOptions())
    assert scores(lambda responses, answer: [float(each == 4) for each in answer], asked) == [1.0, 1.0]
    assert scores(lambda metadata: [float(each["answer"] == "4") for each in metadata], asked) == [1.0, 1.0]
    own = prompt(metadata={"answer": 4})
    assert scores(lambda metadata, answer: [float(each["answer"] == 4) for each in metadata], own) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("function", "kwargs", "message"),
    [
        (lambda completions, trainer_state: [], {}, "'trainer_state', which is not given here"),
        (lambda completions, log_metric: [], {}, "'log_metric'.*return a mapping"),
        (lambda environments, **kwargs: [], {}, r"'environments', .* another process; give its class get_reward\(\)"),
        (lambda responses: [], {"weight": 2}, "has no parameter 'weight', which kwargs sets"),
        (right, {"prompts": []}, "remove 'prompts' from kwargs"),
        (lambda: [], {}, "names nothing that it could score"),
        (lambda *lists: [], {}, "names nothing that it could score"),
        (Grader, {}, r"is the class Grader, not an object of it: write Grader\(...\)"),
        (operator.itemgetter(1), {}, "names nothing|has no signature"),
        (max, {}, "has no signature with names"),
        (3, {}, "is a int, which cannot be called"),
        ((lambda completions: (yield)), {}, "has a yield"),
    ],
)
def test_what_cannot_be_bound_is_refused_with_the_page(function, kwargs, message: str) -> None:
    page = "environments" if "environments" in message else "rewards"
    with pytest.raises(ConfigError, match=rf"(?s)reward function 'mine' .*{message}.*\(docs/{page}.md\)$"):
        FunctionReward(function, name="mine", kwargs=kwargs)


def test_a_state_of_the_trainer_with_a_default_is_not_given() -> None:
    assert scores(lambda completions, trainer_state=None, **kw: [float(trainer_state is None)] * 2) == [1.0, 1.0]


def test_a_parameter_that_is_no_column_is_refused_with_the_row_before_anything_is_sampled() -> None:
    source = FunctionReward(lambda responses, answers: [], name="mine")
    with pytest.raises(DataError, match=r"rows.jsonl, row 3: .*'answers'.*mean 'answer'\?.*answer, finish, level"):
        source.check_prompts([TEXT], {TEXT.id: "rows.jsonl, row 3"})
    with pytest.raises(DataError, match="has a parameter 'answers'"):
        source.score(of())


def test_a_column_that_some_rows_lack_needs_a_default() -> None:
    rows = [prompt("a", answer="4"), prompt("b", metadata={"tests": 1})]
    strict = FunctionReward(right, name="mine")
    with pytest.raises(DataError, match="prompt 'b': reward function 'mine' has a parameter 'answer'"):
        strict.check_prompts(rows, {})
    lenient = FunctionReward(lambda answer=None, tests=None: absent_answers(answer, tests))
    lenient.check_prompts(rows, {})
    found = lenient.score([response(to=rows[1])])  # no row of this batch has an answer, but the data have the column
    assert (found[0].score, dict(found[0].components)) == (1.0, {"answer_is_none": 1.0})


def absent_answers(answer: Any, tests: Any) -> list[dict[str, float]]:
    return [{"score": float(t), "answer_is_none": float(a is None)} for a, t in zip(answer, tests, strict=True)]


def test_a_column_with_a_name_of_ours_is_not_mistaken_for_it() -> None:
    asked = prompt(metadata={"metadata": "of the row"})
    assert scores(lambda responses, metadata: [float(m["metadata"] == "of the row") for m in metadata], asked) == [1, 1]
    source = FunctionReward(lambda completions, metadata: [], name="mine")
    with pytest.raises(DataError, match="in TRL that is the column of the row, here the metadata of the batch"):
        source.check_prompts([asked], {})


@pytest.mark.parametrize("column", ["finish", "token_ids"])
def test_a_column_that_the_response_would_replace_is_refused(column: str) -> None:
    (row,) = [Row(source="rows.jsonl", number=1, values={"prompt": "2+2?", "answer": "4", column: "gold value"})]
    ((asked, *_), _) = load_prompts([row], tiny_tokenizer(), PromptOptions())
    would_get = (lambda completions, finish, token_ids: [], right, lambda responses, metadata: [])
    for function in would_get:
        source = FunctionReward(function, name="mine")
        with pytest.raises(DataError, match=f"^rows.jsonl, row 1: reward function 'mine' .*'{column}'.*rename the col"):
            source.check_prompts([asked], {asked.id: "rows.jsonl, row 1"})
        source.check_prompts([TEXT], {})
    for function in (lambda completions, answer: [], functools.partial(right, finish=1, token_ids=2)):
        FunctionReward(function).check_prompts([asked], {})


class Client:
    """Belongs to the event loop that it was opened in, as clients of services do."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, responses):
        self.loop = self.loop or asyncio.get_running_loop()
        assert self.loop is asyncio.get_running_loop()
        return [1.0 for _ in responses]


def test_an_async_function_keeps_its_event_loop_from_batch_to_batch() -> None:
    client = Client()
    source = FunctionReward(client)
    assert [each.score for _ in range(3) for each in source.score(of())] == [1.0] * 6
    source.close()
    assert client.loop is not None
    assert client.loop.is_closed()


async def fails(responses):
    raise KeyError("x")


def test_an_error_of_an_async_function_is_named_with_its_place() -> None:
    line = fails.__code__.co_firstlineno + 1
    with pytest.raises(TrainingError, match=rf"raised KeyError: 'x' \(.*test_function_binding.py, line {line}\)"):
        FunctionReward(fails).score(of())


async def leaves(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("within", [lambda leaving: leaving, asyncio.gather, asyncio.ensure_future])
def test_an_async_function_that_leaves_is_an_error_and_its_loop_stays(error: BaseException, within: Any) -> None:
    async def graded(responses):
        loops.append(asyncio.get_running_loop())
        if len(loops) == 2:
            await within(leaves(error))
        return [1.0 for _ in responses]

    loops: list[asyncio.AbstractEventLoop] = []
    source = FunctionReward(graded, timeout_seconds=60.0)
    assert [each.score for each in source.score(of())] == [1.0, 1.0]
    with pytest.raises(TrainingError, match=rf"raised {type(error).__name__}.* \(.*test_function_binding.py, line"):
        source.score(of())
    assert [each.score for each in source.score(of())] == [1.0, 1.0]
    source.close()
    assert [loops.count(each) for each in loops] == [3, 3, 3]
    assert loops[0].is_closed()


def test_a_function_that_returns_none_does_not_apply_and_the_others_are_summed() -> None:
    maths = FunctionReward(lambda answer=None, *, completions: [None, 1.0], name="maths")
    code = FunctionReward(lambda completions: [2.0, None], name="code")
    neither = FunctionReward(lambda completions: [None, None], name="neither")
    first, second = WeightedReward([(1.0, maths), (0.5, code)]).score(of())
    assert [(s.score, s.state, dict(s.components)) for s in (first, second)] == [
        (1.0, ScoreState.SCORED, {"code": 2.0}),
        (1.0, ScoreState.SCORED, {"maths": 1.0}),
    ]
    (alone, _) = WeightedReward([(1.0, neither)]).score(of())
    assert (alone.state, alone.valid) == (ScoreState.NOT_APPLICABLE, False)
    sent = read_reply(reply_body([first, alone]), of())
    assert [(each.state, repr(each.score)) for each in sent] == [("scored", "1.0"), ("not_applicable", "nan")]
    first, second = WeightedReward([(1.0, maths), (0.5, code)], task="maths").score(of())
    assert [first.valid, second.valid] == [False, True]


def test_the_end_of_an_async_function_that_does_not_heed_it_is_waited_for_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It holds up nothing: its thread is a daemon."""
    begun, may_end = threading.Event(), threading.Event()
    monkeypatch.setattr(function_binding, "CLOSE_SECONDS", 0.01)
    loop = function_binding.EventLoop()

    async def blocks() -> None:
        begun.set()
        may_end.wait(LATEST_SECONDS)

    loop.wait_for(asyncio.sleep(0))
    thread, inner = loop._thread, loop._loop
    assert thread is not None
    assert inner is not None
    asyncio.run_coroutine_threadsafe(blocks(), inner)
    assert begun.wait(LATEST_SECONDS)
    loop.close()
    assert thread.is_alive()
    may_end.set()
    thread.join(LATEST_SECONDS)
    assert inner.is_closed()
