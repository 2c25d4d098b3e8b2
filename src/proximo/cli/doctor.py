"""`proximo doctor`: reports what a run would find on this machine, with advice: versions, device, memory and others."""

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import requires, version

import typer

from proximo.checkpoint.environment import installed_version
from proximo.message_text import address

GIB = 2**30
SHOWN = ("torch", "transformers", "tokenizers", "safetensors", "peft", "datasets", "numpy")
DEVELOPMENT = ("docs", "test")
"""Extras that no user needs."""
SANDBOX = "python -m proximo_verifiers.sandbox.doctor"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check."""

    found: str
    advice: str | None = None
    """What to do if something is missing or could be better."""


def _requirements() -> Iterator[tuple[str | None, str, str, bool]]:
    """Of each package that Proximo needs: its extra, what is wanted, what is found, and whether that fits."""
    from packaging.requirements import Requirement

    for each in map(Requirement, requires("proximo") or ()):
        marker = str(each.marker or "")
        extra = marker.split('"')[1] if marker.startswith("extra ==") else None
        found = installed_version(each.name)
        fits = found is not None and each.specifier.contains(found, prereleases=True)
        yield extra, f"{each.name}{each.specifier}", f"{each.name} {found or 'is missing'}", fits


def _versions() -> Finding:
    packages = ", ".join(f"{name} {version(name)}" for name in SHOWN)
    wrong = [f"{found} ({wanted} is needed)" for extra, wanted, found, fits in _requirements() if not (extra or fits)]
    return Finding(
        f"proximo {version('proximo')}, Python {platform.python_version()}, {packages}",
        f"{', '.join(wrong)}: install Proximo again" if wrong else None,
    )


def _device() -> Finding:
    import torch

    from proximo.commands.dry_run import has_nvidia_driver
    from proximo.models.precision.placement import resolve_device

    device = resolve_device("auto")
    if device.type == "cuda":
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        names = ", ".join(f"{each.name} with {each.total_memory / GIB:.1f} GiB" for each in devices)
        several = f"{address('scale')} trains on all {len(devices)}: devices.num={len(devices)}"
        return Finding(f"cuda: {names}", several if len(devices) > 1 else None)
    if device.type == "mps":
        return Finding("mps")
    return Finding(
        f"cpu: {torch.backends.cpu.get_cpu_capability()}; no accelerator that torch can use was found",
        f"NVIDIA's driver is installed, but torch {torch.__version__}, for CUDA {torch.version.cuda}, finds no device: "
        "check its build and `nvidia-smi`"
        if has_nvidia_driver()
        else None,
    )


def _precision() -> Finding:
    import torch

    from proximo.kernels import kernels_of
    from proximo.models.precision.placement import resolve_device, resolve_precision

    device = resolve_device("auto").type
    found = f"run.precision auto means {resolve_precision('auto', device=device)} on {device}; the default is float32"
    is_faster = kernels_of(device).bf16_product(torch.empty(0)) is not None
    return Finding(f"{found}; bf16 is faster on this processor" if is_faster else found)


def _kernels() -> Finding:
    import torch

    from proximo.kernels import kernels_of

    each = [kernels_of(device) for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else []))]
    return Finding("; ".join(found.why_missing() or str(found.description()) for found in each))


def _memory() -> Finding:
    import torch

    from proximo.plan.machine import memory_bytes, process_bytes

    total = memory_bytes("cpu")
    assert total is not None
    found = (
        f"{total / GIB:.1f} GiB that this process may use; it takes {process_bytes() / GIB:.1f} with libraries alone"
    )
    if torch.cuda.is_available():
        free, of = torch.cuda.mem_get_info()
        found += f"; of the device's {of / GIB:.1f} GiB, {free / GIB:.1f} are free"
    return Finding(found)


def _sandbox() -> Finding:
    from proximo.errors import as_own_errors
    from proximo_verifiers.sandbox.doctor import State, examine

    with as_own_errors():
        findings = examine()
    lacking = [finding.name for finding in findings if finding.state not in (State.HELD, State.WAIVED)]
    held = f"{len(findings) - len(lacking)} of {len(findings)} guarantees hold"
    if not lacking:
        return Finding(held)
    return Finding(f"{held}, not {', '.join(lacking)}", f"`{SANDBOX}` shows why; only rewards of kind code need it")


def _extras() -> Finding:
    there: dict[str, list[str]] = {}
    missing: dict[str, list[str]] = {}
    for extra, wanted, found, fits in _requirements():
        if extra is not None and extra not in DEVELOPMENT:
            (there if fits else missing).setdefault(extra, []).append(found if fits else wanted)
    complete = [f"{extra} ({', '.join(packages)})" for extra, packages in there.items() if extra not in missing]
    lacking = [f"{extra} ({', '.join(packages)})" for extra, packages in missing.items()]
    return Finding(
        f"{', '.join(complete) or 'none'}; without {', '.join(lacking) or 'none'}",
        "pip install 'proximo[NAME]' adds one" if lacking else None,
    )


CHECKS: dict[str, Callable[[], Finding]] = {
    "versions": _versions,
    "device": _device,
    "precision": _precision,
    "kernels": _kernels,
    "memory": _memory,
    "sandbox": _sandbox,
    "extras": _extras,
}
"""Name of a check -> the function that makes it, in the order of the output."""


def add_to(app: typer.Typer) -> None:
    """Add `proximo doctor` to the command line."""
    app.command()(doctor)


def doctor() -> None:
    """Report what a run would find on this machine, and what to do if something is missing.

    Versions, device, precision, kernels, which are compiled if needed, memory, the sandbox and the extras.

    \b
    proximo doctor
    """
    for name, check in CHECKS.items():
        try:
            finding = check()
        except Exception as error:  # the command exists to report problems of this machine
            finding = Finding(f"unknown: {type(error).__name__}: {error}")
        print(f"{name:12}{finding.found}", flush=True)
        if finding.advice is not None:
            print(f"{'':12}-> {finding.advice}", flush=True)
