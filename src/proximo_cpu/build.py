"""Builds the file of the kernels, or takes it from the cache; also ahead of its use, in the background.

Imports no torch.
"""

import os
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

from proximo.errors import UserError
from proximo_cpu.cache import add_to_cache, cache_folder, find_cached
from proximo_cpu.compiler import Command, compile_kernels, find_compiler, fingerprint

SWITCH = "PROXIMO_KERNELS"
"""Environment variable: `off` uses only torch's operators."""

_BEGUN: dict[Command, Future[Path]] = {}
"""Compiler -> the file that it began to build ahead of its use."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_BEGUN.clear)  # the thread that builds it does not exist in a child


def are_wanted() -> bool:
    """Whether the switch allows the kernels. Raises UserError for an unknown value."""
    said = os.environ.get(SWITCH, "")
    if said.lower() not in ("", "on", "off"):
        raise UserError(f"the environment variable {SWITCH} is {said!r}; it takes on or off")
    return said.lower() != "off"


def begin_build() -> None:
    """Build the file in a thread, while this one imports torch and loads models: a compiler is another process.

    Does nothing where the kernels cannot be had. What goes wrong is raised where they are asked for.
    """
    try:
        compiler = find_compiler() if sys.platform == "linux" and are_wanted() else None
    except UserError:
        return
    if compiler is None or compiler in _BEGUN:
        return
    begun = _BEGUN[compiler] = Future[Path]()

    def run() -> None:
        try:
            begun.set_result(_build(compiler))
        except BaseException as error:
            begun.set_exception(error)

    threading.Thread(target=run, name="kernels in C", daemon=True).start()


def built_file(compiler: Command) -> Path:
    """The file, from the cache or compiled, which takes a few seconds. Waits for what was begun before.

    Raises OSError, RuntimeError or SubprocessError where it cannot be made.
    """
    begun = _BEGUN.get(compiler)
    return _build(compiler) if begun is None else begun.result()


def _build(compiler: Command) -> Path:
    folder, wanted = cache_folder(), fingerprint(compiler)
    return find_cached(folder, wanted) or add_to_cache(folder, wanted, compile_kernels(compiler, folder))
