"""Sections of a user's own classes: in a recipe, their `kind` is the import path `package.module:Class`."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Literal

from pydantic import BaseModel, ValidatorFunctionWrapHandler, create_model

from proximo.errors import ConfigError
from proximo.user_code import IMPORT_PATH, error_text, functions_of_the_working_directory, kept_working_directory


def is_own_kind(kind: object) -> bool:
    """Whether the `kind` of a section is an import path."""
    return isinstance(kind, str) and IMPORT_PATH.fullmatch(kind) is not None


def own_section(path: str, base: type[BaseModel]) -> type[BaseModel]:
    """The class of that import path, with the path as its `kind`. Imports the module, from the working directory too.

    Raises ConfigError if it cannot be imported, or is no subclass of `base`.
    """
    module_name, _, name = path.partition(":")
    wanted = f"a kind with a colon is the import path of a subclass of {base.__name__} (from {base.__module__})"
    try:
        with functions_of_the_working_directory(), kept_working_directory():
            found = getattr(import_module(module_name), name, None)
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise ConfigError(f"{wanted}, and {module_name} cannot be imported ({error_text(error)})") from error
    if found is None:
        raise ConfigError(f"{wanted}, and {module_name} has no {name}")
    if not isinstance(found, type) or not issubclass(found, base) or found is base:
        raise ConfigError(f"{wanted}, and {path} is {found!r:.60}")
    return _of_kind(found, path)


@cache
def _of_kind(section: type[BaseModel], kind: str) -> type[BaseModel]:
    only: Any = Literal.__getitem__(kind)
    return create_model(section.__name__, __base__=section, __module__=section.__module__, kind=(only, kind))


def open_base(section: type[BaseModel]) -> type[BaseModel] | None:
    """The base class of a section whose subclasses may be a user's own: the one with `takes_own`; None without one."""
    bases = (each for each in section.__mro__ if issubclass(each, BaseModel))
    return next((each for each in bases if vars(each).get("takes_own")), None)


def taking_own(base: type[BaseModel]) -> Callable[[Any, ValidatorFunctionWrapHandler], Any]:
    """A validator around a union that also takes instances of `base`, and sections with an import path as `kind`."""

    def validated(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        if isinstance(value, base):
            return value
        if isinstance(value, dict) and is_own_kind(value.get("kind")):
            return own_section(value["kind"], base)(**value)
        return validate(value)

    return validated
