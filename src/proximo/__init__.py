"""Proximo trains language models with PPO. Importing it loads nothing heavy; its public names load when first used."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used, so that `proximo --help` needs no torch."""
    if name == "__version__":
        from importlib.metadata import version  # takes half of a worker's start

        return version("proximo")
    if not name.startswith("_"):
        public = import_module("proximo.api")
        if name in public.__all__:
            return vars(public)[name]
    raise AttributeError(f"module 'proximo' has no public name {name!r}; proximo.api lists them")
