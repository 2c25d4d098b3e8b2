"""The output of a notebook's cell that is updated in place. Not what it shows."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


class UpdatedCell:
    """An output of the running cell. IPython shows it; where a notebook runs, IPython is loaded already."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, html: str, text: str) -> None:
        """Show the HTML in place of what was shown before. `text` is for frontends without HTML."""
        content = {"text/html": html, "text/plain": text}
        if self._handle is None:
            self._handle = import_module("IPython.display").display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


class Pace:
    """Limits how often something is drawn: a few times at once, and then so many times per second."""

    def __init__(self, clock: Callable[[], float], *, per_second: float = 4.0, at_once: int = 8) -> None:
        self._clock = clock
        self._per_second, self._at_once = per_second, float(at_once)
        self._left = self._at_once
        self._last = clock()

    def allows(self) -> bool:
        """Whether to draw now."""
        now = self._clock()
        self._left = min(self._at_once, self._left + (now - self._last) * self._per_second)
        self._last = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
