"""Signals that real processes get."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from proximo.checkpoint.store import CheckpointStore
from proximo.distributed.signals import Interruption
from waiting import LATEST_SECONDS, wait_until

TRAIN = """
import signal, sys, time
from pathlib import Path
from proximo.distributed.signals import Interruption
from proximo.checkpoint.store import CheckpointStore

# A shell that runs the tests in the background ignores SIGINT, nohup ignores SIGHUP, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
folder, step_ends, save_seconds, grace_seconds = sys.argv[1], sys.argv[2] == "True", *map(float, sys.argv[3:5])
store = CheckpointStore(Path(folder), keep_last=2)

def write_slowly(path):
    path.write_text("a")
    if interruption.requested:
        time.sleep(save_seconds)
    path.write_text("whole")

with Interruption(grace_seconds=grace_seconds) as interruption:
    for step in range(1, 1000):
        if step == 2:
            print("ready", flush=True)
        while step > 1 and not (step_ends and interruption.requested):
            time.sleep(0.01)
        if interruption.requested:
            interruption.step_ended()
        store.save(step, {"file": write_slowly}, {"step": step})
        if interruption.requested:
            raise SystemExit(interruption.exit_status)
"""


@contextmanager
def training(
    folder: Path, *, step_ends: bool = True, save: float = 0.0, grace: float = 200.0
) -> Iterator[subprocess.Popen]:
    """A process that saved step 1 and is within step 2, which ends after a signal or never."""
    command = [sys.executable, "-c", TRAIN, str(folder), str(step_ends), str(save), str(grace)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


STATUSES = [
    (signal.SIGTERM, 143),
    (signal.SIGHUP, 129),
    (signal.SIGUSR1, 138),
]


@pytest.mark.parametrize(("number", "status"), STATUSES)
def test_the_first_signal_lets_the_step_end_and_the_save_happen(number, status, tmp_path):
    with training(tmp_path) as process:
        process.send_signal(number)
        assert process.wait(LATEST_SECONDS) == status
        said = process.stderr.read()
    assert f"{number.name}: ending this step (at most 200 s)" in said
    assert "Traceback" not in said
    latest = CheckpointStore(tmp_path).load()
    assert latest.step == 2
    assert latest.path("file").read_text() == "whole"


def test_a_step_that_takes_longer_than_its_grace_is_given_up(tmp_path):
    with training(tmp_path, step_ends=False, grace=0.2) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(LATEST_SECONDS) == 143
        assert "did not end within 0.2 s" in process.stderr.read()
    assert CheckpointStore(tmp_path).load().step == 1


def test_a_save_after_the_step_may_take_longer_than_the_grace(tmp_path):
    with training(tmp_path, save=4, grace=3) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(LATEST_SECONDS) == 143
    assert CheckpointStore(tmp_path).load().step == 2


def test_a_second_signal_ends_the_process_at_once_even_within_a_save(tmp_path):
    with training(tmp_path, save=1000) as process:
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: list(tmp_path.glob(".partial-new-*/file")))
        process.send_signal(signal.SIGTERM)
        assert process.wait(LATEST_SECONDS) == 143
        assert "a second signal" in process.stderr.read()
    assert CheckpointStore(tmp_path).load().step == 1


def test_a_signal_that_the_parent_ignores_stays_ignored(tmp_path):
    """As for a process in the background of a script, which must not mind Ctrl-C."""
    code = "import signal, os; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    code += "from proximo.distributed.signals import Interruption\n"
    code += "with Interruption() as i:\n    os.kill(os.getpid(), signal.SIGINT)\n    print(i.requested)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_program_with_a_use_of_its_own_for_a_users_signal_keeps_it():
    code = "import os, signal\nfrom proximo.distributed.signals import Interruption\n"
    code += "signal.signal(signal.SIGUSR1, lambda *_: print('mine'))\n"
    code += "with Interruption() as i:\n    os.kill(os.getpid(), signal.SIGUSR1)\n    print(i.requested)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "mine\nFalse\n"


def test_a_forked_child_dies_of_the_signal_as_it_would_otherwise(tmp_path):
    """A pool of reward workers ends its workers with SIGTERM."""
    code = "import os, signal, time\nfrom proximo.distributed.signals import Interruption\n"
    code += "begun, begin = os.pipe()\n"
    code += "with Interruption() as i:\n    child = os.fork()\n"
    code += "    if not child: os.write(begin, b'x')\n"
    # Short sleeps: a signal just before a sleep does not end it, and Python runs its handler only behind it.
    code += "    while not child: time.sleep(0.01)\n"
    code += "    os.read(begun, 1), os.kill(child, signal.SIGTERM)\n"
    code += "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), i.requested)\n"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LATEST_SECONDS)
    assert done.stdout == f"{-signal.SIGTERM} False\n"


def test_the_handlers_from_before_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    num_threads = threading.active_count()
    with Interruption() as interruption:
        assert signal.getsignal(signal.SIGTERM) is not before[0]
        assert not interruption.requested
        with pytest.raises(RuntimeError, match="no signal came"):
            _ = interruption.exit_status
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    wait_until(lambda: threading.active_count() == num_threads)


def test_a_training_that_ends_by_itself_after_a_signal_is_left_alone():
    with Interruption(grace_seconds=0.2) as interruption:
        signal.raise_signal(signal.SIGTERM)
        assert interruption.requested
        assert interruption.exit_status == 143
    time.sleep(0.5)


def test_outside_the_main_thread_nothing_is_changed():
    seen = []

    def run() -> None:
        with Interruption() as interruption:
            seen.append((interruption.requested, signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(False, before)]


def test_an_interrupt_of_a_process_that_goes_on_gives_the_step_its_time_and_a_second_one_gives_it_up():
    with Interruption(grace_seconds=0.1, keeps_process=True) as interruption:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.5)  # longer than the grace, which is for a process that is to end
        assert interruption.requested
        assert interruption.exit_status == 130
        with pytest.raises(KeyboardInterrupt, match="a second interrupt"):
            signal.raise_signal(signal.SIGINT)


def test_a_sigterm_ends_also_a_process_that_goes_on_after_an_interrupt(tmp_path):
    code = "import signal, time\nfrom proximo.distributed.signals import Interruption\n"
    code += "with Interruption(grace_seconds=0.2, keeps_process=True) as i:\n"
    code += "    signal.raise_signal(signal.SIGTERM)\n    time.sleep(1000)\n"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LATEST_SECONDS)
    assert done.returncode == 143
    assert "did not end within 0.2 s" in done.stderr
