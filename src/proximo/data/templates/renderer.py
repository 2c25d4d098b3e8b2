"""Renders chat templates within limits, in a separate process (`template_child.py`).

A template comes with a model's folder, so it is untrusted code: it may loop for ever or fill the memory. The process
ends when it exceeds its limits, and a new one serves the next request.
"""

import atexit
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from proximo.errors import DataError, ModelError

CPU_SECONDS = 10
"""Limit of one rendering; a normal template takes about a millisecond."""
MEMORY_BYTES = 2**30
END_SECONDS = 10.0
"""Time for a killed process to end."""
WALL_SECONDS = 300.0
"""Limit for a process that neither computes nor answers."""
ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH")


class RenderingError(DataError):
    """A template refused a conversation; the message is the template's."""


class TemplateLimitError(ModelError):
    """A template used more time or memory than any rendering needs."""


class TemplateRenderer:
    """Renders one conversation at a time, from any thread; the first starts the process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text of a template.

        Raises TemplateSyntaxError for an invalid template, TemplateError if it refuses the variables, and
        TemplateLimitError beyond the limits.
        """
        # Values that JSON cannot represent are replaced by their type's name, as in transformers.
        request = json.dumps(
            {"template": template, "variables": variables}, default=lambda value: f"<{type(value).__name__}>"
        )
        with self._lock:
            reply = json.loads(self._answer(request.encode() + b"\n"))
        if "line" in reply:
            raise TemplateSyntaxError(reply["error"], reply["line"])
        if "error" in reply:
            raise TemplateError(reply["error"])
        if "over" in reply:
            raise _limit_error(f"{MEMORY_BYTES >> 20} MiB of memory")
        return reply["text"]

    def close(self) -> None:
        """End the process that renders templates."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # the kernel ends it when it can
                process.wait(END_SECONDS)
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # the rest of the request is no longer needed
                    pipe and pipe.close()

    def _answer(self, request: bytes) -> bytes:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = _started()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
            return _line(process.stdout)
        except BaseException as error:
            # A late answer must not be taken for the answer to the next request.
            self.close()
            if isinstance(error, TimeoutError):
                raise _limit_error(f"{WALL_SECONDS:.0f} s") from error
            if isinstance(error, (BrokenPipeError, EOFError)):
                too_long = process.returncode == -signal.SIGXCPU
                raise _limit_error(
                    f"{CPU_SECONDS} s of computing" if too_long else "the system's free memory"
                ) from error
            raise


def _started() -> "subprocess.Popen[bytes]":
    known = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    try:
        return subprocess.Popen(
            [
                sys.executable,
                "-P",
                str(Path(__file__).with_name("template_child.py")),
                str(CPU_SECONDS),
                str(MEMORY_BYTES),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that only the trainer gets an interrupt at the terminal
            env=known | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "PYTHONDONTWRITEBYTECODE": "1"},
        )
    except OSError as error:
        raise ModelError(f"no process could be started to render chat templates in: {error}") from error


def _line(pipe: IO[bytes]) -> bytes:
    """The next line. Raises EOFError if the process ends first, TimeoutError after `WALL_SECONDS`."""
    pieces: list[bytes] = []
    deadline = time.monotonic() + WALL_SECONDS
    with selectors.DefaultSelector() as ready:
        ready.register(pipe, selectors.EVENT_READ)
        while not (pieces and pieces[-1].endswith(b"\n")):
            if not ready.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            piece = os.read(pipe.fileno(), 2**16)
            if not piece:
                raise EOFError
            pieces.append(piece)
    return b"".join(pieces)


def _limit_error(limit: str) -> TemplateLimitError:
    return TemplateLimitError(f"it took more than {limit}, so it is broken or malicious")


RENDERER = TemplateRenderer()
"""The renderer of all tokenizers of a process."""
atexit.register(RENDERER.close)
