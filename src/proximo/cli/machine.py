"""What `proximo doctor` looks at: what a run would find on this machine. Not the sandbox's guarantees one by one."""

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
"""A line of a package's metadata: `wandb>=0.31; extra == "wandb"`."""


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

    found = examine()
    lacking = [each.name for each in found if each.state not in (State.HELD, State.WAIVED)]
    held = f"{len(found) - len(lacking)} of {len(found)} guarantees are held"
    return f"{held}, not {', '.join(lacking)}: `proximo doctor sandbox` says why" if lacking else held


def _extras() -> str:
    missing: dict[str, list[str]] = {}
    wanted = [found.groups() for each in requires("proximo") or () if (found := REQUIREMENT.match(each))]
    for package, extra in wanted:
        if extra != "test":
            missing.setdefault(extra, []).extend([] if _is_installed(package) else [package])
    there = [extra for extra, packages in missing.items() if not packages]
    absent = [extra for extra, packages in missing.items() if packages]
    names, others = (", ".join(sorted(each)) or "none" for each in (there, absent))
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
"""Name -> what there is to say, in the order in which it is shown."""


def examine_machine() -> Iterator[tuple[str, str]]:
    """Each check's name and finding; one that fails says why, and the others go on."""
    for name, check in CHECKS.items():
        try:
            yield name, check()
        except Exception as error:  # whatever is wrong with this machine is what is asked for
            yield name, f"could not be told: {type(error).__name__}: {error}"
