"""Functions that a user brings: how they are named in a recipe, and where they raised."""

import re
import traceback
from typing import Any

from proximo_verifiers.callables import innermost

IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""`package.module:function`."""


def said(error: BaseException) -> str:
    """The kind of an error and its words, if it has any."""
    return f"{type(error).__name__}: {error}".rstrip(": ")


def place_of(error: BaseException, function: Any = None) -> str:
    """Where it was raised, as "file, line 3"; within a library, where the function's own file called that."""
    frames = traceback.extract_tb(error.__traceback__)
    inner = innermost(function)
    code = getattr(inner, "__code__", None) or getattr(getattr(type(inner), "__call__", None), "__code__", None)  # noqa: B004
    own = getattr(code, "co_filename", None)
    at = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
    return f"{at.filename}, line {at.lineno}"
