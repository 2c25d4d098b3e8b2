"""The kernels in C beside this file, compiled once per machine and loaded. Not what calls them.

They need Linux and a C compiler (`$CC`, `cc`, `gcc` or `clang`) with GCC's vector extensions. Threads are those of
torch's own OpenMP: nothing is linked, so that its names are found in what torch has loaded. Without the kernels, and
where `PROXIMO_KERNELS=off` says so, torch's operators do the same work, slower.
"""

import ctypes
import logging
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from proximo.errors import UserError
from proximo.native.compiler import compile_kernels, find_compiler, fingerprint, version_of, why_it_failed
from proximo.native.kept import find_kept, folder_for_kernels, keep

SWITCH = "PROXIMO_KERNELS"
"""Environment variable: `off` for torch's operators alone."""

_DECLARING = threading.Lock()

LOG = logging.getLogger("proximo.native")


def kernels_for(like: Tensor) -> ctypes.CDLL | None:
    """The kernels where they can compute with tensors like this one: real numbers in float32 on a CPU, and nobody
    follows the operators of the caller's thread. Whoever calls them answers for the other tensors."""
    plain = type(like) in (Tensor, torch.nn.Parameter) and like.dtype is torch.float32 and like.device.type == "cpu"
    return library() if plain and _get_current_dispatch_mode() is None else None


@cache
def library() -> ctypes.CDLL | None:
    """Compiled if need be, in a few seconds; None where that is not possible, which is said once, or not wanted.

    Raises UserError for a switch that says neither.
    """
    found, reason = _library_or_reason()
    if found is None and _is_wanted() and sys.platform == "linux":
        LOG.warning("%s", reason)
    return found


def why_no_kernels() -> str | None:
    """In one line, what keeps this machine or this process from them; None where they are there."""
    return _library_or_reason()[1]


def describe_kernels() -> str | None:
    """What identifies the kernels in use, for the record of a run; None where there are none."""
    compiler = None if library() is None else find_compiler()
    if compiler is None:
        return None
    return f"{version_of(compiler).partition(chr(10))[0]}, {fingerprint(compiler)}"


def declare(kernels: ctypes.CDLL, signatures: Mapping[str, Sequence[Any]]) -> None:
    """`signatures`: of each function, what it returns and what it takes. To be told before a function is called."""
    with _DECLARING:  # a look-up by two threads at once may find two objects, one of them undeclared
        for name, (returned, *taken) in signatures.items():
            function = getattr(kernels, name)
            function.restype, function.argtypes = returned, taken


def pointer(tensor: Tensor | None) -> int | None:
    """Where a contiguous tensor begins."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "kernels read rows without gaps"
    return tensor.data_ptr()


def _is_wanted() -> bool:
    said = os.environ.get(SWITCH, "")
    if said.lower() not in ("", "on", "off"):
        raise UserError(f"the environment variable {SWITCH} is {said!r}; it takes on or off")
    return said.lower() != "off"


@cache
def _library_or_reason() -> tuple[ctypes.CDLL | None, str | None]:
    if not _is_wanted():
        return None, f"no kernels in C: {SWITCH} is off"
    if sys.platform != "linux":
        return None, "no kernels in C: they need Linux"
    compiler = find_compiler()
    if compiler is None:
        problem = "no C compiler was found (cc, gcc, clang); install gcc"
    else:
        try:
            folder, wanted = folder_for_kernels(), fingerprint(compiler)
            path = find_kept(folder, wanted) or keep(folder, wanted, compile_kernels(compiler, folder))
            return ctypes.CDLL(str(path)), None
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            problem = f"{shlex.join(compiler)} could not make them: {why_it_failed(error)}"
    return None, (
        f"no kernels in C, so that torch's operators sample and train on a CPU, slower ({SWITCH}=off says that this is "
        f"meant): {problem}"
    )
