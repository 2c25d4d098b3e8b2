"""The command line of `proximo`: one file for each group of commands, assembled in `program.py`.

The commands do their work in `commands/`. Importing this folder imports neither torch nor transformers.
"""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status, as `program.main` does."""
    from proximo.cli import program

    return program.main(sys.argv[1:] if argv is None else argv)


__all__ = ["main"]
