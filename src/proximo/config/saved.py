"""Reads settings that a run saved."""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from proximo.config.schema.base import Section
from proximo.config.schema.validation_messages import key_path
from proximo.errors import RunFolderError

Kind = TypeVar("Kind", bound=Section)


def read_saved(kind: type[Kind], saved: Mapping[str, Any], *, saved_by: str | None) -> Kind:
    """Build a section from its dump.

    Raises RunFolderError for settings that this version does not take. `saved_by`: the version that saved them, if
    known.
    """
    try:
        return kind.model_validate(dict(saved))
    except ValidationError as error:
        lines = [f"  {_difference(detail, saved)}" for detail in error.errors()]
        version = "the version of Proximo that saved it" if saved_by is None else f"proximo {saved_by}, which saved it"
        raise RunFolderError(
            "the run was saved with settings that this version of Proximo does not take:\n"
            + "\n".join(lines)
            + f"\n  go on with {version}, or start a run in another folder"
        ) from error


def _difference(error: ErrorDetails, saved: Mapping[str, Any]) -> str:
    name = ".".join(key_path(error, saved))
    if error["type"] == "extra_forbidden":
        return f"{name} (saved as {json.dumps(error['input'])}): there is no such setting"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{name}: {message}" if name else message
