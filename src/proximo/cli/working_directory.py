"""Makes modules of the working directory importable, for functions that a recipe names."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def functions_of_the_working_directory() -> Generator[None]:
    """Append the working directory to the import path. It comes last, so that a stray file cannot shadow a package."""
    added = os.getcwd()
    sys.path.append(added)
    try:
        yield
    finally:
        sys.path.remove(added)
