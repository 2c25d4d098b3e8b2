"""Functions that a user brings: what can be told of them before they are called."""

import asyncio
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from proximo.callables import calling_problem


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


def test_arguments_that_do_not_fit_are_named_with_the_signature() -> None:
    assert calling_problem(at_once, ["x"], {"speed": 2}) == (
        "its signature is (text: str) -> str: got an unexpected keyword argument 'speed'"
    )
    assert calling_problem(functools.partial(at_once, "x")) is None
    assert "missing" in str(calling_problem(AtOnce()))
