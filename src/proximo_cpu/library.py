"""Loads the C kernels of csrc/, which are compiled once per machine.

They need Linux and a C compiler (`$CC`, `cc`, `gcc` or `clang`) with GCC's vector extensions. Their threads are those
of the OpenMP runtime that torch has loaded, so nothing is linked. Without the kernels, or with `PROXIMO_KERNELS=off`,
torch's operators do the same work, slower.
"""

import ctypes
import logging
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

from proximo_cpu.build import SWITCH, are_wanted, built_file
from proximo_cpu.compiler import find_compiler, fingerprint, version_of, why_it_failed

_DECLARING = threading.Lock()

LOG = logging.getLogger("proximo.kernels")


def kernels_for(like: Tensor) -> ctypes.CDLL | None:
    """The kernels, if they can compute with a tensor like this one: plain float32 on a CPU, and no dispatch mode that
    records the operators of this thread. The caller is responsible for the other tensors of a call."""
    return library() if like.dtype is torch.float32 and is_plain(like) else None


def is_plain(tensor: Tensor) -> bool:
    """Whether kernels may read it: no subclass, on a CPU, and nothing records the operators of this thread."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    return plain and _get_current_dispatch_mode() is None


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, compiled if necessary, which takes a few seconds; None if they are unavailable or switched off.

    Logs one warning if they could not be compiled. Raises UserError for an unknown value of the switch.
    """
    kernels, reason = _library_or_reason()
    if kernels is None and are_wanted() and sys.platform == "linux":
        LOG.warning("%s", reason)
    return kernels


def why_no_kernels() -> str | None:
    """In one line, why there are no kernels; None if there are."""
    return _library_or_reason()[1]


def describe_kernels() -> str | None:
    """Compiler version and fingerprint of the kernels in use, for the record of a run; None without kernels."""
    compiler = None if library() is None else find_compiler()
    if compiler is None:
        return None
    return f"{version_of(compiler).partition(chr(10))[0]}, {fingerprint(compiler)}"


def declare(kernels: ctypes.CDLL, signatures: Mapping[str, Sequence[Any]]) -> None:
    """Set the ctypes signatures: for each function its result type, then its argument types. Call before using one."""
    with _DECLARING:  # two threads that look a function up at once may get two objects, one of them without a signature
        for name, (returned, *taken) in signatures.items():
            function = getattr(kernels, name)
            function.restype, function.argtypes = returned, taken


def pointer(tensor: Tensor | None) -> int | None:
    """The address of a contiguous tensor; None for None."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "kernels read rows without gaps"
    return tensor.data_ptr()


@cache
def _library_or_reason() -> tuple[ctypes.CDLL | None, str | None]:
    if not are_wanted():
        return None, f"no kernels in C: {SWITCH} is off"
    if sys.platform != "linux":
        return None, "no kernels in C: they need Linux"
    compiler = find_compiler()
    if compiler is None:
        problem = "no C compiler was found (cc, gcc, clang); install gcc"
    else:
        try:
            return ctypes.CDLL(str(built_file(compiler))), None
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            problem = f"{shlex.join(compiler)} could not make them: {why_it_failed(error)}"
    return None, (
        f"no kernels in C, so torch's operators sample and train on a CPU, slower ({SWITCH}=off if intended): {problem}"
    )
