"""Rows that a Python function of the user yields, imported by its path."""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from proximo.data.rows import Row, nearest
from proximo.errors import DataError, ProximoError, memory_ran_out
from proximo.user_code import error_text, kept_working_directory, where_raised
from proximo_verifiers.callables import calling_problem


def function_rows(import_path: str, arguments: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of `package.module:function`, called with the arguments; it yields one mapping per row.

    Raises DataError if the import, the arguments or a row is wrong, and if the function raises.
    """
    function = _imported(import_path)
    if problem := calling_problem(function, keywords=arguments, may_yield=True):
        raise DataError(f"{import_path} is called with the arguments {sorted(arguments)}, but {problem}")
    number = 0
    with kept_working_directory():
        try:
            rows = function(**arguments)
            if not isinstance(rows, Iterable) or isinstance(rows, Mapping):
                raise DataError(f"{import_path}: the function must yield rows, it returned {type(rows).__name__}")
            for number, values in enumerate(rows, start=1):
                if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
                    raise DataError(
                        f"{import_path}, row {number}: a row must be a mapping from column names to values, got "
                        f"{values!r:.80}"
                    )
                yield Row(source=import_path, number=number, values=dict(values))
        except Exception as error:
            if isinstance(error, ProximoError) or memory_ran_out(error):
                raise
            where = f"after row {number}" if number else "before its first row"
            told = f"{error_text(error)} ({where_raised(error, function)})"
            raise DataError(f"{import_path} raised {told} {where}") from error


def _imported(import_path: str) -> Callable[..., Any]:
    module_name, _, function_name = import_path.partition(":")
    try:
        with kept_working_directory():
            module = importlib.import_module(module_name)
    except Exception as error:  # it is the user's code that runs here
        if memory_ran_out(error):
            raise
        raise DataError(
            f"{import_path}: cannot import '{module_name}': {error_text(error)} ({where_raised(error)}); is it "
            "installed, or its folder in PYTHONPATH?"
        ) from error
    names = vars(module)
    if function_name not in names or not callable(names[function_name]):
        functions = [name for name, value in names.items() if callable(value) and not name.startswith("_")]
        raise DataError(
            f"{import_path}: '{module_name}' has no function '{function_name}'{nearest(function_name, functions)}"
        )
    return names[function_name]
