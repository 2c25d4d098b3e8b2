"""The peak of memory is what the system says that it was."""

import re
import sys
from pathlib import Path

import pytest
import torch

from proximo.run.memory import peak_memory_mib

STATUS = Path("/proc/self/status")


def resident(name: str) -> float:
    """MiB that Linux reports of this process: VmRSS now, VmHWM at its highest."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found
    return int(found[1]) / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which Linux alone has")
def test_the_peak_is_the_most_that_was_resident_at_once() -> None:
    device = torch.device("cpu")
    before = peak_memory_mib(device)
    size = int(resident("VmHWM") - resident("VmRSS")) + 64
    held = torch.ones(size * 2**18)
    during = peak_memory_mib(device)
    del held
    assert during > before + 32
    assert peak_memory_mib(device) >= during
    assert during == pytest.approx(resident("VmHWM"), abs=16)
