"""Measures how long processes were runnable but waited for a processor, from /proc/PID/task/TID/schedstat.

The kernel counts these nanoseconds for each thread (Linux, Documentation/scheduler/sched-stats.rst).
"""

import os

NANOSECONDS = 1e-9


class Delays:
    """Delays of this process and of processes behind pidfds.

    `processes` is the open /proc of the machine, since this process may be in a namespace without /proc.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes

    def own(self) -> float:
        """The delay of this process in seconds; 0 if the kernel does not count it."""
        return self._of_threads("self/task") or 0.0

    def of(self, pidfd: int) -> float | None:
        """The delay in seconds of a process and its living threads; None if it has ended or the kernel does not
        tell."""
        process = self._process_id(pidfd)
        return self._of_threads(f"{process}/task") if process > 0 else None

    def _process_id(self, pidfd: int) -> int:
        """The process id on the machine; below 1 if the process has ended."""
        for line in self._text(f"self/fdinfo/{pidfd}").splitlines():
            if line.startswith("Pid:"):
                return int(line.split()[1])
        return 0

    def _of_threads(self, folder: str) -> float | None:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._processes)
        except OSError:
            return None
        try:
            counts = [self._text(f"{folder}/{thread}/schedstat").split() for thread in os.listdir(descriptor)]
        except OSError:
            return None
        finally:
            os.close(descriptor)
        known = [int(count[1]) for count in counts if len(count) == 3]
        return sum(known) * NANOSECONDS if known else None

    def _text(self, name: str) -> str:
        """The contents of a file; empty if it cannot be read."""
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._processes)
        except OSError:
            return ""
        try:
            return os.read(descriptor, 4096).decode()
        except OSError:
            return ""
        finally:
            os.close(descriptor)
