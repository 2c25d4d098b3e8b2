"""How long processes have waited for a processor: /proc/PID/task/TID/schedstat. Not what that excuses: fork_server.py.

The kernel counts there, for each thread, the nanoseconds in which it could have run and did not (Linux'
Documentation/scheduler/sched-stats.rst).
"""

import os

NANOSECONDS = 1e-9


class Delays:
    """Of the processes behind pidfds, and of this one. `processes` is the open /proc of the machine: a process may be
    in a namespace, and see no /proc itself."""

    def __init__(self, processes: int) -> None:
        self._processes = processes

    def own(self) -> float:
        """Seconds of this process; 0 where the kernel does not count."""
        return self._of_threads("self/task") or 0.0

    def of(self, pidfd: int) -> float | None:
        """Seconds of a process and its living threads; None where it is gone, or the kernel does not count or tell."""
        process = self._process_id(pidfd)
        return self._of_threads(f"{process}/task") if process > 0 else None

    def _process_id(self, pidfd: int) -> int:
        """As the machine counts; below 1 where it is gone."""
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
        """Empty for what cannot be read."""
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
