"""Rows that a Python function yields. Runs only the function that the user named, by import."""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from proximo.callables import calling_problem
from proximo.data.rows import Row, nearest
from proximo.errors import DataError


def function_rows(import_path: str, arguments: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of `package.module:function`, called with the arguments; it yields one mapping per row.

    Raises DataError where the import, the arguments or a row is wrong. What the function itself raises passes through.
    """
    function = _imported(import_path)
    if problem := calling_problem(function, keywords=arguments, may_yield=True):
        raise DataError(f"{import_path} is called with the arguments {sorted(arguments)}, but {problem}")
    rows = function(**arguments)
    if not isinstance(rows, Iterable):
        raise DataError(f"{import_path}: the function must yield rows, it returned {type(rows).__name__}")
    for number, values in enumerate(rows, start=1):
        if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
            raise DataError(
                f"{import_path}, row {number}: a row must be a mapping from column names to values, got {values!r:.80}"
            )
        yield Row(source=import_path, number=number, values=values)


def _imported(import_path: str) -> Callable[..., Any]:
    module_name, _, function_name = import_path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise DataError(
            f"{import_path}: cannot import '{module_name}': {error}; is it installed, or its folder in PYTHONPATH?"
        ) from error
    names = vars(module)
    if function_name not in names or not callable(names[function_name]):
        found = [name for name, value in names.items() if callable(value) and not name.startswith("_")]
        raise DataError(
            f"{import_path}: '{module_name}' has no function '{function_name}'{nearest(function_name, found)}"
        )
    return names[function_name]
