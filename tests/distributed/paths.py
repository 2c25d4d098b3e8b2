"""The path of a sharded model through its layers, for a model of one rank too."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from proximo.models import fast_path


@contextmanager
def plain_paths() -> Iterator[None]:
    """The modules of transformers instead of fused layers and the decoding kernel."""
    usual = dict(fast_path.paths())
    fast_path.paths().update({key: replace(path, layers=None, decoder=None) for key, path in usual.items()})
    try:
        yield
    finally:
        fast_path.paths().update(usual)
