"""Functions and objects that a Python program passes to a training, under import paths that a recipe can hold.

A recipe names a function by its import path. A function of a notebook, a lambda or an object has none, so it becomes an
attribute of this module: `proximo.session_functions:score`. It is known to this process only.
"""

import functools
import hashlib
import inspect
import sys
from collections.abc import Mapping
from operator import length_hint
from typing import Any

MODULE = __name__


def import_path(function: Any, names: dict[str, Any]) -> str:
    """The import path of the function; if it cannot be imported by name, a path of this module, noted in `names`."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__name__", None) or type(function).__name__
    if module not in (None, "__main__") and name and getattr(sys.modules.get(module), name, None) is function:
        return f"{module}:{name}"
    stem = name if name and name.isidentifier() and not name.startswith("_") else "function"
    chosen, number = stem, 2
    while chosen in _OWN_NAMES or names.get(chosen, function) is not function:
        chosen, number = f"{stem}_{number}", number + 1
    names[chosen] = function
    return f"{MODULE}:{chosen}"


def publish(names: Mapping[str, Any]) -> None:
    """Make the functions importable from this module. They replace earlier ones with the same names."""
    vars(sys.modules[MODULE]).update(names)


def problem(name: str) -> str | None:
    """Why the import path `proximo.session_functions:NAME` cannot be used in this process; None if it can."""
    if name not in _OWN_NAMES and name in vars(sys.modules[MODULE]):
        return None
    return (
        f"{name!r} was given to the run in Python and is not known to this process: use the run from a program that "
        "gives it again, or put the function into a module"
    )


def num_rows(path: str) -> int | None:
    """The number of rows given to a training under this import path; None if it is unknown, or these are no rows."""
    module, _, name = path.partition(":")
    number = length_hint(vars(sys.modules[MODULE]).get(name), -1) if module == MODULE else -1
    return None if number < 0 else number


def digest(name: str) -> str | None:
    """The first 16 hex digits of the SHA-256 of the source text, as text; None if Python has no source.

    For an object it covers the methods of its class, and of base classes from the same module.
    """
    function = vars(sys.modules[MODULE]).get(name)
    try:
        source = "\n".join(inspect.getsource(each) for each in _written(function))
    except (OSError, TypeError):
        return None
    return f"source with sha256 {hashlib.sha256(source.encode()).hexdigest()[:16]}" if source else None


def _written(function: Any) -> list[Any]:
    while isinstance(function, functools.partial):
        function = function.func
    if hasattr(function, "__code__"):
        return [function]
    own = function if isinstance(function, type) else type(function)
    classes = [each for each in own.__mro__ if each.__module__ == own.__module__]
    return [method for each in classes for _, method in sorted(vars(each).items()) if hasattr(method, "__code__")]


_OWN_NAMES = frozenset(vars())
