"""What Python's search for cyclic garbage is spared: the objects of imported modules, which stay. Not of a run."""

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def imports_set_apart() -> Generator[None]:
    """For importing torch and transformers: no search meanwhile, and none ever among the objects that they made.

    These are a million. Going through all of them again and again takes a sixth of the time of the import, and half a
    second in each full search afterwards. A process in which torch was there before keeps its objects in the search:
    it may hold models that are still to go.
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
