"""Prints what a command loads before it begins."""

import sys
from collections.abc import Generator
from contextlib import contextmanager

from proximo.early_interrupt import EndsSilently


@contextmanager
def loading(what: str = "torch and transformers", *, quiet: bool = False) -> Generator[None]:
    """Print on stderr what is imported inside: on a busy machine it takes a minute without any other output.

    Ctrl-C inside ends the process at once.
    """
    if not quiet:
        print(f"loading {what}", file=sys.stderr, flush=True)
    with EndsSilently():
        yield
