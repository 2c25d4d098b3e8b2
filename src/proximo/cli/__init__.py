"""The command line of `proximo`: one file for each group of commands, assembled in `program.py`.

The commands do their work in `commands/`. Importing this folder imports neither torch nor transformers.
"""

import sys
from collections.abc import Sequence

from proximo.early_interrupt import end_silently, raise_again


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status, as `program.main` does.

    While the modules are imported, Ctrl-C ends the process without a traceback: no run has begun yet.
    """
    end_silently()
    try:
        from proximo.cli import program
    finally:
        raise_again()
    return program.main(sys.argv[1:] if argv is None else argv)


__all__ = ["main"]
