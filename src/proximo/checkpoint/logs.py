"""Append-only files of JSON lines, each with a "step", and how they are cut back on resume."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proximo.checkpoint import atomic


class JsonLines:
    """A file with one line per record, flushed after every line.

    The lines of a killed process are therefore kept. Call `sync` before a checkpoint is saved, so that a power failure
    cannot keep the checkpoint and lose the lines before it.
    """

    def __init__(self, path: Path) -> None:
        atomic.make_folder(path.parent)
        self._path = path
        self._file = path.open("ab")
        self.num_lines = path.read_bytes().count(b"\n")

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record with an integer "step". Numbers that are not finite become null."""
        text = json.dumps(_finite(record), ensure_ascii=False, allow_nan=False)
        with atomic.naming(self._path):
            self._file.write(text.encode("utf-8", errors="replace") + b"\n")
            self._file.flush()
        self.num_lines += 1

    def sync(self) -> None:
        """Return once every line is on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. No record is appended after it."""
        with atomic.naming(self._path):
            self._file.close()


def cut_back(path: Path, step: int) -> int:
    """Delete every record after `step`, and lines that are no record, as a crash leaves the last one.

    Returns the number of lines left. The file is replaced atomically; it need not exist.
    """
    if not path.is_file():
        return 0
    content = path.read_bytes()
    steps = [(line, _step_of(line)) for line in content.split(b"\n")]
    kept = [line + b"\n" for line, line_step in steps if line_step is not None and line_step <= step]
    if (wanted := b"".join(kept)) != content:
        atomic.write_bytes_atomically(path, wanted)
    return len(kept)


def _step_of(line: bytes) -> int | None:
    try:
        record = json.loads(line)
    except ValueError:  # cut off, perhaps within a character
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value
