"""Versions of installed packages, read without importing them."""

import platform
from importlib import metadata

PACKAGES = ("proximo", "torch", "transformers", "tokenizers", "peft", "datasets", "safetensors", "numpy")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide the bits of a run."""
    return {"python": platform.python_version(), **{package: installed_version(package) for package in PACKAGES}}


def installed_version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
