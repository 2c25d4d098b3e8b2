"""The checks of `proximo doctor`: versions, device, memory and other facts of this machine."""

import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

GIB = 2**30
SHOWN = ("torch", "transformers", "tokenizers", "safetensors", "peft", "datasets", "numpy")
REQUIREMENT = re.compile(r"([\w.-]+)[^;]*; extra == ['\"]([\w-]+)['\"]")
"""Matches a requirement in a package's metadata, for example `wandb>=0.31; extra == "wandb"`."""


def _versions() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in SHOWN)
    return f"proximo {version('proximo')}, Python {platform.python_version()}, {packages}"


def _device() -> str:
    import torch

    from proximo.models.precision.placement import resolve_device

    device = resolve_device("auto")
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name()}"
    return (
        "mps" if device.type == "mps" else f"cpu: {torch.backends.cpu.get_cpu_capability()}; no accelerator was found"
    )


def _precision() -> str:
    import torch

    from proximo.models.precision.placement import resolve_device

    if resolve_device("auto").type == "cuda" and not torch.cuda.is_bf16_supported():
        return "float32; this accelerator has no bf16"
    return "float32, the default, and bf16 (run.precision; auto takes what suits the device)"


def _threads() -> str:
    import torch

    return f"{torch.get_num_threads()} of {os.cpu_count()} cores (run.num_threads, OMP_NUM_THREADS)"


def _kernels() -> str:
    from proximo.native.library import describe_kernels, why_no_kernels

    return why_no_kernels() or str(describe_kernels())


def _memory() -> str:
    from proximo.plan.machine import memory_bytes, process_bytes

    total = memory_bytes("cpu")
    assert total is not None
    return f"{total / GIB:.1f} GiB that this process may use; it takes {process_bytes() / GIB:.1f} with libraries alone"


def _disk() -> str:
    here = Path.cwd()
    writable = "" if os.access(here, os.W_OK) else ", and it cannot be written"
    return f"{shutil.disk_usage(here).free / GIB:.1f} GiB free in {here}{writable}"


def _sandbox() -> str:
    from proximo.sandbox.doctor import State, examine

    findings = examine()
    lacking = [finding.name for finding in findings if finding.state not in (State.HELD, State.WAIVED)]
    held = f"{len(findings) - len(lacking)} of {len(findings)} guarantees hold"
    return f"{held}, not {', '.join(lacking)}: `proximo doctor sandbox` says why" if lacking else held


def _extras() -> str:
    missing: dict[str, list[str]] = {}
    requirements = [match.groups() for line in requires("proximo") or () if (match := REQUIREMENT.match(line))]
    for package, extra in requirements:
        if extra != "test":
            missing.setdefault(extra, []).extend([] if _is_installed(package) else [package])
    complete = [extra for extra, packages in missing.items() if not packages]
    incomplete = [extra for extra, packages in missing.items() if packages]
    names, others = (", ".join(sorted(extras)) or "none" for extras in (complete, incomplete))
    return f"{names}; without {others} (pip install 'proximo[NAME]')"


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


CHECKS: dict[str, Callable[[], str]] = {
    "versions": _versions,
    "device": _device,
    "precision": _precision,
    "threads": _threads,
    "kernels": _kernels,
    "memory": _memory,
    "disk": _disk,
    "sandbox": _sandbox,
    "extras": _extras,
}
"""Name of a check -> function that returns its result as text, in the order of the output."""


def examine_machine() -> Iterator[tuple[str, str]]:
    """Name and result of each check. A check that fails gives its error as the result."""
    for name, check in CHECKS.items():
        try:
            yield name, check()
        except Exception as error:  # the command exists to report problems of this machine
            yield name, f"unknown: {type(error).__name__}: {error}"
