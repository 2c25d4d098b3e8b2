"""Environments of other packages, taken as they are: one file for each form. Worker processes import them, no torch."""

import importlib
from typing import Any

from proximo.errors import MissingExtraError


def package(name: str, extra: str) -> Any:
    """The module of an optional package. Raises MissingExtraError, which names the extra."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"environments of this kind need the package of the extra {extra} ({error}): pip install 'proximo[{extra}]'"
        ) from error
