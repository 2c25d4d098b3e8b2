"""Reads and writes the state of a checkpoint. A missing entry is refused with the reason."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Never, TypeVar

from proximo.errors import CheckpointError

Record = TypeVar("Record")
_ANOTHER_VERSION = (
    "another version of Proximo saved it (`saved_by` in its manifest.json says which). Go on with that version, or "
    "start a run in another folder"
)


class SavedState(dict[str, Any]):
    """A mapping that refuses with CheckpointError where it lacks what is asked for by `[]`."""

    def __missing__(self, key: str) -> Never:
        """Raises CheckpointError that names the missing entry."""
        raise CheckpointError(f"the state of the checkpoint has no {key!r}: {_ANOTHER_VERSION}")


def as_record(record_type: Callable[..., Record], saved: Mapping[str, Any]) -> Record:
    """A dataclass whose fields were saved by name.

    Raises CheckpointError for a value that it has no field for, and for a field without value or default.
    """
    try:
        return record_type(**saved)
    except TypeError as error:
        raise CheckpointError(f"the state of the checkpoint does not fit ({error}): {_ANOTHER_VERSION}") from error


def encode_state(state: Mapping[str, Any]) -> bytes:
    """The state as JSON text. Raises TypeError where it would not come back as it is."""
    text = json.dumps(state, indent=1, allow_nan=False)
    if json.loads(text) != state:
        raise TypeError(
            "the state of a checkpoint must come back from JSON as it went in: keys must be strings, and "
            "sequences lists (a tuple would come back as a list)"
        )
    return (text + "\n").encode()
