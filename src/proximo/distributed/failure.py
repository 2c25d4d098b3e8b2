"""The record of what ended a run of several ranks, which the first who knows leaves in the store for all."""

import json
from dataclasses import asdict, dataclass
from typing import Self

FAILURE = "failure"
"""Key of the record. Written once: what follows from a failure does not replace it."""
TOLD = "told"
"""Key that is set by who prints the message."""
MOST_CHARACTERS = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why the ranks end."""

    rank: int | None
    """The rank that failed or is gone; None for the process that started the ranks."""
    message: str
    status: int = 1
    """The exit status of every rank."""
    is_alive: bool = False
    """Whether that rank still runs, and can say itself what happened to it."""

    def encode(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self) | {"message": self.message[:MOST_CHARACTERS]})

    @classmethod
    def decode(cls, text: bytes) -> Self:
        """What `encode` wrote."""
        return cls(**json.loads(text))
