"""The files that lie around a command line. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path


def write_files(folder: str | Path, files: Mapping[str, str | bytes]) -> None:
    """Make them, and the folders that they are in."""
    for name, content in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
