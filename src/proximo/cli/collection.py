"""Says what a command loads before it begins, and keeps Python's garbage collector away from imported modules."""

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager

from proximo.early_interrupt import EndsSilently


@contextmanager
def loading(what: str = "torch and transformers", *, quiet: bool = False) -> Generator[None]:
    """Say on stderr what is imported inside, without collection, and exclude those objects from it for good.

    Under load the imports take a minute, in which nothing else is printed. They create about a million objects.
    Scanning them takes a sixth of the time of the import, and half a second in every later full collection. If torch
    was imported before, nothing is frozen, because the process may hold models that must be collected.

    Ctrl-C inside ends the process at once.
    """
    if not quiet:
        print(f"loading {what}", file=sys.stderr, flush=True)
    is_first, was_on = "torch" not in sys.modules, gc.isenabled()
    gc.disable()
    try:
        with EndsSilently():
            yield
        if is_first:
            gc.freeze()
    finally:
        if was_on:
            gc.enable()
