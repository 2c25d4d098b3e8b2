"""Settings that a run was saved with, as this version understands them. Not the reading of recipes (loader.py)."""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from proximo.config.schema.base import SAVED, Section
from proximo.config.schema.validation_messages import key_path
from proximo.errors import RunFolderError

Kind = TypeVar("Kind", bound=Section)


def read_saved(kind: type[Kind], saved: Mapping[str, Any], *, saved_by: str | None) -> Kind:
    """The section of which `saved` is a dump by this or an earlier version.

    A setting that was not there yet has its default, or what its `AbsentMeans` says. Raises RunFolderError for those
    that were removed, renamed or are no longer valid; `saved_by` is the version that knows them, where it is known.
    """
    try:
        return kind.model_validate(dict(saved), context=SAVED)
    except ValidationError as error:
        lines = [f"  {_difference(each, saved)}" for each in error.errors()]
        version = "the version of Proximo that saved it" if saved_by is None else f"proximo {saved_by}, which saved it"
        raise RunFolderError(
            "the run was saved with settings that this version of Proximo does not take:\n"
            + "\n".join(lines)
            + f"\n  go on with {version}, or start a run in another folder"
        ) from error


def _difference(error: ErrorDetails, saved: Mapping[str, Any]) -> str:
    name = ".".join(key_path(error, saved))
    if error["type"] == "extra_forbidden":
        return f"{name} (saved as {json.dumps(error['input'])}): there is no such setting any more"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{name}: {message}" if name else message
