"""Checks of a class, function or object that a user brings: whether it can be called as it will be."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any


def calling_problem(
    function: Callable[..., Any],
    arguments: Sequence[Any] = (),
    keywords: Mapping[str, Any] | None = None,
    *,
    names: Sequence[str] = (),
    may_yield: bool = False,
    may_await: bool = False,
) -> str | None:
    """Why `function(*arguments, **keywords)` cannot give its answer at once; None where nothing can be found wrong.

    `names`: what the arguments are called. A parameter that has the name of another argument than it would get is
    wrong; other names are the function's own affair.

    A function that is async, or one with `yield`, hands back an object before any of its lines has run. What a plain
    function around an async one does, waiting or not, is only known when it is called.
    """
    if not callable(function):
        return f"it is a {type(function).__name__}, which cannot be called"
    if problem := deferral(function, may_yield=may_yield, may_await=may_await):
        return problem
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none to look at
        return None
    try:
        signature.bind(*arguments, **(keywords or {}))
    except TypeError as error:
        return f"its signature is {signature}: {error}"
    return _in_another_order(signature, names)


def _in_another_order(signature: inspect.Signature, names: Sequence[str]) -> str | None:
    by_place = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    own = [each.name for each in signature.parameters.values() if each.kind in by_place]
    for place, name in enumerate(names[: len(own)]):
        if own[place] != name and own[place] in names:
            return f"its parameter {own[place]} would get {name}: the order is ({', '.join(names)})"
    return None


def methods_problem(made: Any, calls: Sequence[str], *, may_await: bool = False) -> str | None:
    """Everything that is wrong with the methods of an object, in one sentence: "it has no a(b) and no c()".

    `calls` are the methods as they will be called, such as `write(step, metrics)`; `row=...` is given by name.
    """
    kind = type(made).__name__
    if isinstance(made, type):
        return f"it is the class {made.__name__}, not an object of it: write {made.__name__}(...)"
    absent = [call for call in calls if not callable(getattr(made, call.partition("(")[0], None))]
    problems = [f"it ({kind}) has no method {' and no method '.join(absent)}"] if absent else []
    for call in calls:
        name, _, inner = call.rstrip(")").partition("(")
        given = [each for each in inner.split(", ") if each]
        keywords = {each.removesuffix("=..."): None for each in given if each.endswith("=...")}
        names = [each for each in given if not each.endswith("=...")]
        if call not in absent and (
            problem := calling_problem(
                getattr(made, name), [None] * len(names), keywords, names=names, may_await=may_await
            )
        ):
            problems.append(f"{call} cannot be called, since {problem}")
    return "; ".join(problems) or None


def deferral(function: Callable[..., Any], *, may_yield: bool = False, may_await: bool = False) -> str | None:
    """Why the function hands back an object before any of its lines has run; None where nothing of that is found."""
    function = innermost(function)
    for each in (function, getattr(function, "__call__", None)):  # noqa: B004  (what it is, not whether it is there)
        if inspect.isasyncgenfunction(each) or (inspect.iscoroutinefunction(each) and not may_await):
            return "it is async: write it with def, and wait inside it for what is async, as with asyncio.run"
        if inspect.isgeneratorfunction(each) and not may_yield:
            return "it has a yield, and so returns a generator: return a list"
    return None


def innermost(function: Any) -> Any:
    """Below partials and caches, which hand on what the function within returns."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "cache_info") and hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return function
