"""Messages on a pipe: a length of four bytes, then JSON. Neither end unpickles or executes what it receives."""

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

MAX_FRAME_BYTES = 2**26
"""Largest message. A longer one is refused before memory is allocated for it."""
_LENGTH_BYTES = 4


class FrameError(ValueError):
    """The bytes are not a message."""


def encode(message: Any) -> bytes:
    """The message as bytes. Raises ValueError or TypeError for what cannot be written as JSON."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body):,} bytes exceeds the limit of {MAX_FRAME_BYTES:,}")
    return len(body).to_bytes(_LENGTH_BYTES) + body


class FrameDecoder:
    """Assembles messages from the pieces that a pipe delivers."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> Iterator[Any]:
        """The messages that this piece completes. Raises FrameError for invalid bytes."""
        self._buffer += piece
        while len(self._buffer) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + _body_bytes(self._buffer[:_LENGTH_BYTES])
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH_BYTES:end])
            del self._buffer[:end]
            yield _parsed(body)


def read_frame(stream: BinaryIO) -> Any | None:
    """The next message of a blocking stream, None at its end. Raises FrameError for invalid bytes."""
    prefix = stream.read(_LENGTH_BYTES)
    if len(prefix) < _LENGTH_BYTES:
        return None
    num_bytes = _body_bytes(prefix)
    body = stream.read(num_bytes)
    return _parsed(body) if len(body) == num_bytes else None


def _body_bytes(prefix: bytes | bytearray) -> int:
    num_bytes = int.from_bytes(prefix)
    if num_bytes > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {num_bytes:,} bytes was announced, the limit is {MAX_FRAME_BYTES:,}")
    return num_bytes


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"invalid JSON: {error}") from error
