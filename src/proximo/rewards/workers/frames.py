"""Messages on a pipe: four bytes of length, then JSON. Read by both ends; neither unpickles or runs what came."""

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

MAX_FRAME_BYTES = 2**26
"""A longer message is no message: whoever sent it is not to be trusted with our memory."""
_LENGTH_BYTES = 4


class FrameError(ValueError):
    """What came is no message."""


def encode(message: Any) -> bytes:
    """A message as bytes. Raises ValueError or TypeError for what JSON cannot say."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body):,} bytes is more than the {MAX_FRAME_BYTES:,} that fit into one")
    return len(body).to_bytes(_LENGTH_BYTES) + body


class Decoder:
    """Puts messages together from whatever pieces a pipe delivers them in."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> Iterator[Any]:
        """The messages that this piece completes. Raises FrameError for what is none."""
        self._buffer += piece
        while len(self._buffer) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + _body_bytes(self._buffer[:_LENGTH_BYTES])
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH_BYTES:end])
            del self._buffer[:end]
            yield _parsed(body)


def read_frame(stream: BinaryIO) -> Any | None:
    """The next message of a stream that blocks; None at its end. Raises FrameError for what is no message."""
    prefix = stream.read(_LENGTH_BYTES)
    if len(prefix) < _LENGTH_BYTES:
        return None
    num_bytes = _body_bytes(prefix)
    body = stream.read(num_bytes)
    return _parsed(body) if len(body) == num_bytes else None


def _body_bytes(prefix: bytes | bytearray) -> int:
    num_bytes = int.from_bytes(prefix)
    if num_bytes > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {num_bytes:,} bytes was announced, at most {MAX_FRAME_BYTES:,} are taken")
    return num_bytes


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"no JSON: {error}") from error
