"""Starts the ranks of one machine as copies of a command, and waits for them.

This process serves the store in which the ranks find each other, so that the store outlives any rank. It does not
train. The store listens on the loopback address only.

Torch's elastic agent is not used. When one rank ends, it sends SIGTERM to the others and kills them after 30 s, while
rank 0 may still write the report. It also hides with which status a run ends that a signal stops. For restarts,
start the same command by `torchrun --max-restarts`.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

from proximo.distributed.failure import FAILURE, PRINTED, Failure, is_stopped
from proximo.distributed.rank_environment import LAUNCHED, without_ranks
from proximo.distributed.signals import heeded_signals
from proximo.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import Store

LOOPBACK = "127.0.0.1"
END_SECONDS = 60.0
"""Seconds that the other ranks have to end after one failed: rank 0 writes the report of the run. A stopped process
cannot end, and is killed immediately."""
POLL_SECONDS = 0.05
INTERRUPT_SECONDS = 1.0
"""A terminal sends SIGINT to all processes. It is passed on if rank 0 still lives after so many seconds."""


def launch(command: Sequence[str], *, num: int, when_lost: Callable[[str, str], None] | None = None) -> int:
    """Run `num` ranks of a command on this machine. Returns the exit status of rank 0, else that of a failed rank.

    `when_lost`: called if a signal ended rank 0, which could not report it, with the name of its process
    (`process 4711 on node1`) and the reason. Raises ConfigError if the machine cannot start so many processes.
    """
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen(max(128, 4 * num))
        port = listener.getsockname()[1]
        ranks = _Ranks()
        try:
            for rank in range(num):
                ranks.processes.append(_start(command, rank=rank, num=num, port=port))
            return ranks.wait(listener, when_lost)
        finally:
            ranks.kill()


def _start(command: Sequence[str], *, rank: int, num: int, port: int) -> subprocess.Popen[bytes]:
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(num),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        LAUNCHED: str(os.getpid()),
    }
    try:
        return subprocess.Popen(command, env={**without_ranks(os.environ), **environment})
    except OSError as error:
        raise ConfigError(
            f"rank {rank} of {num} cannot be started on this machine ({error}): set devices.num to the number of its "
            "devices, or raise the limits of processes and memory (`ulimit -a`)"
        ) from error


class _Ranks:
    """The processes of the ranks, and their records in the store."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.signals: list[tuple[int, float]] = []
        """Received signals, each with the time at which it is passed on."""

    def wait(self, listener: socket.socket, when_lost: Callable[[str, str], None] | None) -> int:
        """Wait for all ranks. Returns the exit status of the run."""
        heeded = heeded_signals() if threading.current_thread() is threading.main_thread() else []
        previous = {number: signal.signal(number, self._on_signal) for number in heeded}
        try:
            store = _serve(listener)
            self._watch(store)
            status = self._status(store)
            ended_by = -self.processes[0].returncode
            if when_lost is not None and ended_by > 0 and ended_by not in (number for number, _ in self.signals):
                when_lost(_name(self.processes[0]), Failure.decode(store.get(FAILURE)).message)
            return status
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def kill(self, *, only_stopped: bool = False) -> None:
        """End the remaining processes, or only those that are stopped and cannot end by themselves."""
        for process in self.processes:
            if process.poll() is None and (is_stopped(process.pid) or not only_stopped):
                process.kill()
                process.wait()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        wait = INTERRUPT_SECONDS if number == signal.SIGINT else 0.0
        self.signals.append((number, time.monotonic() + wait))

    def _watch(self, store: "Store") -> None:
        running, num_forwarded, end = dict(enumerate(self.processes)), 0, float("inf")
        while running:
            for rank, process in list(running.items()):
                if process.poll() is not None:
                    del running[rank]
                    if process.returncode:
                        store.compare_set(FAILURE, "", _failure_of(rank, process).encode())  # unless there is one
                        end = min(end, time.monotonic() + END_SECONDS)
            for number, due in self.signals[num_forwarded:]:
                if time.monotonic() >= due:
                    num_forwarded += 1
                    self.processes[0].send_signal(number)  # does nothing where it ended
            if end < float("inf"):
                self.kill(only_stopped=time.monotonic() <= end)
            time.sleep(POLL_SECONDS)

    def _status(self, store: "Store") -> int:
        statuses = [process.returncode for process in self.processes]
        status = _shell_status(statuses[0] or next((status for status in statuses if status), 0))
        is_untold = status and not self.signals and store.compare_set(PRINTED, "", "all") == b"all"
        if is_untold and store.check([FAILURE]):
            print(f"error: {Failure.decode(store.get(FAILURE)).message}", file=sys.stderr)
        return status


def _serve(listener: socket.socket) -> "Store":
    """Serve the store of the ranks. This process uses the keys of `failure.py` in it."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch.distributed as dist

    port, descriptor = listener.getsockname()[1], listener.detach()
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "timeout": timedelta(seconds=30)}
    return dist.PrefixStore("proximo/0", dist.TCPStore(LOOPBACK, port, master_listen_fd=descriptor, **options))


def _failure_of(rank: int, process: subprocess.Popen[bytes]) -> Failure:
    status = process.returncode
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return Failure(rank=rank, message=f"rank {rank} ({_name(process)}) {how}", status=_shell_status(status))


def _name(process: subprocess.Popen[bytes]) -> str:
    return f"process {process.pid} on {socket.gethostname()}"


def _shell_status(status: int) -> int:
    """128 + the signal that ended a process, or its exit status."""
    return 128 - status if status < 0 else status
