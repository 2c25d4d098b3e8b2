"""Functions that a recipe names may lie in the folder that the user started from. Imports none of them."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def functions_of_the_working_directory() -> Generator[None]:
    """Import from the working directory too, but last: a stray file there must not hide an installed package."""
    added = os.getcwd()
    sys.path.append(added)
    try:
        yield
    finally:
        sys.path.remove(added)
