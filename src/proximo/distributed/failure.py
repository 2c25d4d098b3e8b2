"""The record of what ended a run of several ranks. The first process that knows writes it to the store for all."""

import json
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from proximo.errors import ProximoError, redacted

FAILURE = "failure"
"""Key of the record. It is written once, so that later failures do not replace the first."""
PRINTED = "printed"
"""Key that the process sets which prints the message."""
MOST_CHARACTERS = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why the ranks end."""

    rank: int | None
    """The rank that failed or disappeared; None for the process that started the ranks."""
    message: str
    status: int = 1
    """The exit status of every rank."""
    is_alive: bool = False
    """Whether that rank still runs, and can print what happened to it."""

    def encode(self) -> str:
        """This failure as JSON, its message cut to `MOST_CHARACTERS`."""
        return json.dumps(asdict(self) | {"message": self.message[:MOST_CHARACTERS]})

    @classmethod
    def decode(cls, text: bytes) -> Self:
        """The failure that `encode` wrote as JSON."""
        return cls(**json.loads(text))


def status_of(error: BaseException) -> int:
    """The exit status of a process that ends with this exception."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_status if isinstance(error, ProximoError) else 1


def keep_traceback(error: BaseException, path: Path | None) -> str:
    """Append an exception's traceback to a file, and return how its message is to end.

    Without a file the message has the traceback, unless the error explains itself.
    """
    text = redacted("".join(traceback.format_exception(error)))
    if path is None:
        return "" if isinstance(error, ProximoError) else f"\n{text}"
    try:
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as refused:
        return f" (its traceback could not be written: {refused})\n{text}"
    return f"; its traceback is in {path}"
