"""Functions that a user brings: what can be told of them before they are called."""

import asyncio
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from proximo.user_code import error_text, where_raised
from proximo_verifiers.callables import calling_problem, methods_problem


async def later(text: str) -> str:
    return text


async def piecemeal(text: str) -> Any:
    yield text


def letters(text: str) -> Iterator[str]:
    yield from text


def at_once(text: str) -> str:
    return text


class Later:
    async def __call__(self, text: str) -> str:
        return text

    async def method(self, text: str) -> str:
        return text


class AtOnce:
    def __call__(self, text: str) -> str:
        return text


@functools.wraps(later)
def waits(text: str) -> str:
    return asyncio.run(later(text))


ASYNC = [
    later,
    piecemeal,
    functools.partial(later),
    functools.partial(functools.partial(later)),
    functools.cache(later),
    functools.partial(Later()),
    Later(),
    Later().method,
]


@pytest.mark.parametrize("function", ASYNC)
def test_what_is_async_is_found_beneath_whatever_hands_it_on(function: Callable[..., Any]) -> None:
    assert "it is async" in str(calling_problem(function, ["x"]))


def test_a_generator_is_refused_where_a_list_is_wanted() -> None:
    assert "yield" in str(calling_problem(letters, ["x"]))
    assert calling_problem(letters, ["x"], may_yield=True) is None


@pytest.mark.parametrize(
    "function", [at_once, AtOnce(), functools.partial(at_once), functools.cache(at_once), waits, str]
)
def test_what_can_be_called_has_no_problem(function: Callable[..., Any]) -> None:
    assert calling_problem(function, ["x"]) is None


def swapped(metrics: object, step: int) -> None: ...


class Swapped:
    def write(self, metrics: object, step: int) -> None: ...


def test_two_arguments_in_another_order_are_told_by_their_names() -> None:
    names = ("step", "metrics")
    wrong = "its parameter metrics would get step: the order is (step, metrics)"
    assert calling_problem(swapped, [1, {}], names=names) == wrong
    assert calling_problem(swapped, [1, {}]) is None
    for fine in (lambda step, metrics: None, lambda number, line: None, lambda *given: None, lambda a, metrics: None):
        assert calling_problem(fine, [1, {}], names=names) is None
    assert (
        methods_problem(Swapped(), ["write(step, metrics)"]) == f"write(step, metrics) cannot be called, since {wrong}"
    )


def test_arguments_that_do_not_fit_are_named_with_the_signature() -> None:
    assert calling_problem(at_once, ["x"], {"speed": 2}) == (
        "its signature is (text: str) -> str: got an unexpected keyword argument 'speed'"
    )
    assert calling_problem(functools.partial(at_once, "x")) is None
    assert "missing" in str(calling_problem(AtOnce()))


class Half:
    written = None

    def close(self, how: str) -> None:
        pass

    def told(self, *, row: int) -> None:
        pass


def test_all_that_is_wrong_with_an_object_is_told_at_once() -> None:
    problem = methods_problem(Half(), ["write(step, metrics)", "flush()", "written(row)", "close()", "told(row=...)"])
    assert problem == (
        "it (Half) has no method write(step, metrics) and no method flush() and no method written(row); "
        "close() cannot be called, since its signature is (how: str) -> None: missing a required argument: 'how'"
    )
    assert methods_problem(Half(), ["close(how)", "told(row=...)"]) is None
    assert methods_problem(Half, ["close(how)"]) == "it is the class Half, not an object of it: write Half(...)"


def test_what_cannot_be_called_is_named_by_its_kind() -> None:
    assert calling_problem(3) == "it is a int, which cannot be called"  # ty: ignore[invalid-argument-type]


def in_a_library() -> None:
    json.loads("{")


@pytest.mark.parametrize("function", [in_a_library, functools.partial(in_a_library)])
def test_the_place_of_an_error_is_in_the_file_of_the_function(function: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="property name") as caught:
        function()
    assert where_raised(caught.value, function) == f"{__file__}, line {in_a_library.__code__.co_firstlineno + 1}"
    assert where_raised(caught.value).split(",")[0].endswith("decoder.py")


def test_an_error_without_words_is_told_by_its_kind() -> None:
    assert error_text(StopIteration()) == "StopIteration"
    assert error_text(KeyError("a")) == "KeyError: 'a'"
