"""Versions of installed packages. Imports nothing of them."""

from importlib import metadata


def installed_version(package: str) -> str | None:
    """None for a part that was left out, and where this one runs from a source folder."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
