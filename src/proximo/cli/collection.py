"""Keeps Python's garbage collector away from the objects of imported modules, which live until the process ends."""

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def imports_without_collection() -> Generator[None]:
    """Turn collection off while torch and transformers are imported, and exclude their objects from it for good.

    The imports create about a million objects. Scanning them takes a sixth of the time of the import, and half a
    second in every later full collection. If torch was imported before, nothing is frozen, because the process may hold
    models that must be collected.
    """
    is_first, was_on = "torch" not in sys.modules, gc.isenabled()
    gc.disable()
    try:
        yield
        if is_first:
            gc.freeze()
    finally:
        if was_on:
            gc.enable()
