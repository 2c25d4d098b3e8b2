"""The command line of `proximo`. Importing it imports neither torch nor transformers."""

import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status, as `program.main` does.

    While the modules are imported, Ctrl-C ends the process without a traceback: no run has begun yet.
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
