"""Versions of installed packages. Imports nothing of them."""

import platform
from importlib import metadata

PACKAGES = ("proximo", "torch", "transformers", "tokenizers", "peft", "datasets", "safetensors", "numpy")


def versions() -> dict[str, str | None]:
    """Those of Python and of the packages that decide the bits of a run."""
    return {"python": platform.python_version(), **{package: installed_version(package) for package in PACKAGES}}


def installed_version(package: str) -> str | None:
    """None for a part that was left out, and where this one runs from a source folder."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
