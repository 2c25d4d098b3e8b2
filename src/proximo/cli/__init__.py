"""The command `proximo`: arguments in, exit status out. Importing it imports no torch and no transformers."""

from proximo.cli.program import main

__all__ = ["main"]
