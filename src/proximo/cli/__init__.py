"""The command `proximo`: arguments in, exit status out. Importing it imports no torch and no transformers."""

import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status, as `program.main` does.

    What it needs is imported here, where Ctrl-C ends the process without a word: nothing has begun.
    """
    at_interrupt = signal.getsignal(signal.SIGINT)
    try:
        if at_interrupt is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        from proximo.cli import program
    finally:
        if at_interrupt is signal.default_int_handler:
            signal.signal(signal.SIGINT, at_interrupt)
    return program.main(sys.argv[1:] if argv is None else argv)


__all__ = ["main"]
