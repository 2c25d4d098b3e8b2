"""How long a process waited for a processor, read off a /proc that is made here, and off the real one."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from proximo_verifiers.sandbox.inside.delays import Delays


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[int]:
    """The open /proc of a machine on which descriptor 5 is process 77, with two threads, and 6 is one that is gone."""
    notes = tmp_path / "self" / "fdinfo"
    notes.mkdir(parents=True)
    (notes / "5").write_text("pos:\t0\nflags:\t02000002\nPid:\t77\nNSpid:\t77\t3\n")
    (notes / "6").write_text("pos:\t0\nflags:\t02000002\nPid:\t-1\nNSpid:\t-1\n")
    for thread, text in ((77, "5000000000 2000000000 31\n"), (78, "1000000000 500000000 2\n")):
        (tmp_path / "77" / "task" / str(thread)).mkdir(parents=True)
        (tmp_path / "77" / "task" / str(thread) / "schedstat").write_text(text)
    descriptor = os.open(tmp_path, os.O_PATH)
    yield descriptor
    os.close(descriptor)


def test_the_second_number_of_each_thread_counts(processes) -> None:
    assert Delays(processes).of(5) == pytest.approx(2.5)


def test_what_the_kernel_does_not_tell_is_not_nothing(processes, tmp_path) -> None:
    delays = Delays(processes)
    assert delays.of(6) is None, "it is gone"
    assert delays.of(7) is None, "no such descriptor"
    for file in tmp_path.glob("77/task/*/schedstat"):
        file.unlink()
    assert delays.of(5) is None, "a kernel that does not count"
    assert delays.own() == 0.0


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count")
def test_this_process_is_seen_in_the_real_one() -> None:
    processes = os.open("/proc", os.O_PATH)
    myself = os.pidfd_open(os.getpid())
    try:
        delays = Delays(processes)
        before = delays.of(myself)
        time.sleep(0.01)
        assert before is not None
        assert 0 <= before <= (delays.of(myself) or 0.0) <= delays.own() + 1
    finally:
        os.close(processes)
        os.close(myself)
