"""The door to kernels: an outside plug-in is found by its entry point, and what cannot be loaded is refused."""

from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from proximo import kernels
from proximo.checkpoint.environment import describe_environment
from proximo.errors import UserError
from proximo.kernels import GROUP, bf16_product, kernels_of, row_operations
from proximo.models.fast_path import fast_path, paths
from proximo.models.precision.placement import Precision
from proximo_cpu.plug_in import CPUKernels

OUTSIDE = """
class Attention:
    def __init__(self, lengths, prefixes=()):
        self.lengths = lengths


class Kernels:
    def begin(self):
        pass

    def row_operations(self, like):
        return self if like.numel() > 1 else None

    def bf16_product(self, like):
        return None

    def passes(self, *, half):
        return {"attention": Attention} if half else {}

    def description(self):
        return "outside 1.0"

    def why_missing(self):
        return None
"""


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    kernels._loaded.cache_clear()
    paths.cache_clear()


def install(folder: Path, name: str, entry: str, patch: pytest.MonkeyPatch) -> None:
    """A distribution with one plug-in, as pip would leave it on the path."""
    (folder / f"{name}.py").write_text(OUTSIDE)
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{GROUP}]\n{entry}\n")
    patch.syspath_prepend(folder)


def test_the_installed_package_names_its_plug_in() -> None:
    """Where this fails, an editable install is older than the entry point: install it again."""
    assert [entry.value for entry in entry_points(group=GROUP, name="cpu")] == ["proximo_cpu.plug_in:CPUKernels"]
    assert type(kernels_of("cpu")) is CPUKernels


def test_an_outside_plug_in_brings_paths_row_operations_and_its_description(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "outside_kernels", "mps = outside_kernels:Kernels", monkeypatch)
    half = fast_path("mps", Precision.BF16)
    assert half.attention is not None
    assert half.attention.__module__ == "outside_kernels"
    assert (half.bf16_head, half.layers) == (True, None)
    assert fast_path("mps", Precision.FLOAT32).attention is None
    assert fast_path("cpu", Precision.BF16).attention.__module__ == "proximo_cpu.attention"
    assert kernels_of("mps:0") is kernels_of("mps")
    assert describe_environment(device="mps")["kernels"] == "outside 1.0"


def test_plug_ins_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        kernels, "entry_points", lambda **given: (asked.append(given["name"]), entry_points(**given))[1]
    )
    for _ in range(3):
        fast_path("cpu", Precision.FLOAT32)
        row_operations(torch.zeros(2))
        bf16_product(torch.zeros(2))
        row_operations(torch.zeros(2, device="meta"))
    assert sorted(asked) == ["cpu", "cuda", "meta", "mps"]


def test_where_there_is_none_the_plain_path_runs_and_only_a_cpu_misses_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "entry_points", lambda **_: ())
    for device in ("cpu", "cuda", "xpu"):
        assert type(kernels_of(device)).__module__ == kernels.__name__
        assert kernels_of(device).description() is None
        kernels_of(device).begin()
    assert fast_path("cpu", Precision.FLOAT32).layers is None
    assert fast_path("cpu", Precision.BF16).bf16_head
    assert row_operations(torch.zeros(2)) is None
    assert bf16_product(torch.zeros(2)) is None
    assert "the package proximo_cpu is not installed" in str(kernels_of("cpu").why_missing())
    assert kernels_of("cuda").why_missing() is None


def test_two_plug_ins_for_one_device_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "outside_kernels", "cpu = outside_kernels:Kernels", monkeypatch)
    with pytest.raises(
        UserError, match=r"one plug-in can bring the kernels for cpu, and 2 are installed: .* of proximo"
    ):
        kernels_of("cpu")


@pytest.mark.parametrize("value", ["not_there:Kernels", "outside_kernels:NotThere", "outside_kernels:Attention"])
def test_a_plug_in_that_cannot_be_loaded_is_refused_by_name(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "outside_kernels", f"xpu = {value}", monkeypatch)
    with pytest.raises(UserError, match=f"the plug-in {value} of outside_kernels for xpu could not be loaded"):
        kernels_of("xpu")
