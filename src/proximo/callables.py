"""Functions that a user brings: whether they can be called as they will be, told without calling them."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def calling_problem(
    function: Callable[..., Any],
    arguments: Sequence[Any] = (),
    keywords: Mapping[str, Any] | None = None,
    *,
    may_yield: bool = False,
) -> str | None:
    """Why `function(*arguments, **keywords)` cannot give its answer at once; None where nothing can be found wrong.

    A function that is async, or one with `yield`, hands back an object before any of its lines has run. What a plain
    function around an async one does, waiting or not, is only known when it is called.
    """
    if problem := _deferral(_innermost(function), may_yield=may_yield):
        return problem
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none to look at
        return None
    try:
        signature.bind(*arguments, **(keywords or {}))
    except TypeError as error:
        return f"its signature is {signature}: {error}"
    return None


def _innermost(function: Any) -> Any:
    """Below partials and caches, which hand on what the function within returns."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "cache_info") and hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return function


def _deferral(function: Callable[..., Any], *, may_yield: bool) -> str | None:
    for each in (function, getattr(function, "__call__", None)):  # noqa: B004  (what it is, not whether it is there)
        if inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each):
            return "it is async: write it with def, and wait inside it for what is async, as with asyncio.run"
        if inspect.isgeneratorfunction(each) and not may_yield:
            return "it has a yield, and so returns a generator: return a list"
    return None
