"""What the kernels need besides torch."""

import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec

NEEDED = ("triton", "proximo_cpu")


def is_installed() -> bool:
    """Whether all of it is installed."""
    return all(find_spec(name) is not None for name in NEEDED)


@cache
def has_triton() -> bool:
    """Whether Triton can be imported, which takes a second. One that cannot is a warning."""
    if not is_installed():
        return False
    try:
        import_module("triton")
    except Exception as error:  # of another vendor's it may be anything
        warnings.warn(f"no kernels for cuda: Triton cannot be imported: {type(error).__name__}: {error}", stacklevel=2)
        return False
    return True
