"""What the kernels need: Triton, and a trial on the device."""

import warnings
from collections.abc import Callable
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


def is_right(what: str, device: object, why_not: Callable[[], str | None]) -> bool:
    """Whether a trial finds nothing wrong with kernels. `why_not`: None, or what it finds.

    A finding, or an error of Triton, is a warning: torch's operators then run, more slowly.
    """
    try:
        reason = why_not()
    except Exception as error:  # a compiler of another vendor's may raise anything
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        warnings.warn(f"the fused {what} not used on {device}: {reason}", stacklevel=3)
    return reason is None
