"""The fork server: forks programs, watches their limits and reports their ends.

It knows nothing of a program but its limits. Source, files, input and output pass it as descriptors, so a program finds
nothing of another in its inherited memory. The server ends with all programs when its socket is closed or the caller
dies. On a machine without mount namespaces programs write to scratch folders on a disk, which it makes and removes.
"""

import contextlib
import json
import os
import select
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

from proximo_verifiers.sandbox.inside.child import Assignment, SharedConfinement, confine, move_up
from proximo_verifiers.sandbox.inside.delays import Delays
from proximo_verifiers.sandbox.inside.execution import OUT_OF_MEMORY_STATUS, run_as_main, set_home
from proximo_verifiers.sandbox.jobs import Ending, Limits
from proximo_verifiers.sandbox.kernel.namespaces import JOB_FOLDER, MAX_FILES
from proximo_verifiers.sandbox.mechanisms import UIDS_PER_SERVER, program_uid

MAX_MESSAGE_BYTES = 1 << 16
MAX_DESCRIPTORS = 64
CONFINED = b"confined "
"""Prefix of the report of a confined child, followed by its CPU seconds. Any other report is an error."""
SHORTEST_LOOK_SECONDS = 0.002
FOLDER_LOOK_SECONDS = 0.01


@dataclass(kw_only=True, slots=True)
class Child:
    """A running program, as the fork server sees it."""

    name: int
    slot: int
    pid: int
    pidfd: int
    limits: Limits
    folder: str
    start_seconds: float
    start_cpu_seconds: float
    start_lost_seconds: float
    lost_seconds: float = 0.0
    """Time that it waited for a processor, as of the last look."""
    losses_known: bool = True
    """False if the kernel does not count waiting time, or hides it."""
    helpers: list["Child"] = field(default_factory=list)
    busy_seconds: float = 0.0
    """Time in which it ran or waited for a processor; set when it has ended."""
    ending: Ending | None = None
    """Why the server killed it, if it did."""

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds so far, without the start."""
        # CPUCLOCK_SCHED of another process: include/linux/posix-timers_types.h.
        return time.clock_gettime((~self.pid << 3) | 2) - self.start_cpu_seconds

    @property
    def wall_seconds(self) -> float:
        """Wall-clock seconds since its start."""
        return time.monotonic() - self.start_seconds

    @property
    def idle_seconds(self) -> float:
        """An upper bound of the idle seconds; it includes waiting for a processor since the last look."""
        helped = sum(helper.busy_seconds or helper.cpu_seconds + helper.lost_seconds for helper in self.helpers)
        return max(0.0, self.wall_seconds - self.cpu_seconds - self.lost_seconds - helped)

    def end(self, ending: Ending) -> None:
        """Kills the program. The first reason is kept."""
        if self.ending is None:
            self.ending = ending
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


class ForkServer:
    """Serves one caller over `control` until it has ended."""

    def __init__(
        self,
        control: socket.socket,
        caller: int,
        shared: SharedConfinement,
        *,
        owner: int | None,
        folders: str,
        delays: Delays,
    ) -> None:
        """`caller` is a pidfd. `owner` is the base of the uids of programs, or None if they have no uids of their own.

        `folders` is the folder for scratch folders, used if programs cannot have file systems of their own.
        """
        self.delays = delays
        self.control = control
        self.caller = caller
        self.shared = shared
        self.owner = owner
        self.children: dict[int, Child] = {}
        self.poll = select.poll()
        self.poll.register(control, select.POLLIN)
        self.poll.register(caller, select.POLLIN)
        in_namespaces = shared.mechanisms.namespaces is None
        self.folders = None if in_namespaces else make_folder_of_folders(folders)

    def serve(self) -> None:
        """Serves until the caller has ended."""
        try:
            while self._poll_once():
                pass
        finally:
            for child in list(self.children.values()):
                child.end(Ending.KILLED)
                os.waitpid(child.pid, 0)
            if self.folders is not None:
                remove_folder(self.folders)

    def _poll_once(self) -> bool:
        wait = self._seconds_to_next_look()
        ready = {number for number, _ in self.poll.poll(None if wait is None else wait * 1000)}
        for child in list(self.children.values()):
            if child.pidfd in ready:
                self._report_end(child)
            else:
                self._check_limits(child)
        if self.caller in ready:
            return False
        return self._handle_order() if self.control.fileno() in ready else True

    def _seconds_to_next_look(self) -> float | None:
        """Seconds in which no program can exceed a limit. CPU time passes no faster than cores and threads allow."""
        waits = []
        for child in self.children.values():
            rate = min(os.cpu_count() or 1, child.limits.threads)
            cpu = (child.limits.cpu_seconds - child.cpu_seconds) / rate
            wall = child.limits.wall_seconds - child.wall_seconds
            idle = wall if child.limits.idle_seconds is None else child.limits.idle_seconds - child.idle_seconds
            waits.append(max(SHORTEST_LOOK_SECONDS, min(cpu, wall, idle)))
            if self.folders is not None:
                waits.append(FOLDER_LOOK_SECONDS)
        return min(waits, default=None)

    def _check_limits(self, child: Child) -> None:
        if child.cpu_seconds >= child.limits.cpu_seconds:
            child.end(Ending.CPU)
        elif child.wall_seconds >= child.limits.wall_seconds:
            child.end(Ending.WALL)
        elif child.limits.idle_seconds is not None and self._is_idle_too_long(child, child.limits.idle_seconds):
            child.end(Ending.IDLE)
        elif self.folders is not None and folder_exceeds(child.folder, num_bytes=child.limits.scratch_bytes):
            child.end(Ending.SCRATCH)

    def _is_idle_too_long(self, child: Child, limit: float) -> bool:
        if child.idle_seconds < limit:
            return False
        self._update_losses(child)
        return child.idle_seconds >= limit

    def _update_losses(self, child: Child) -> None:
        """Updates the waiting times of a program and its helpers.

        They include those of this process and of the caller, which the program depends on.
        """
        for program in (child, *child.helpers):
            if not program.busy_seconds:
                own = self.delays.of(program.pidfd)
                program.losses_known = own is not None
                losses = (own or 0.0) + self._server_losses() - program.start_lost_seconds
                program.lost_seconds = max(program.lost_seconds, losses)

    def _server_losses(self) -> float:
        return self.delays.own() + (self.delays.of(self.caller) or 0.0)

    def _report_end(self, child: Child) -> None:
        self._update_losses(child)
        wall, idle = child.wall_seconds, child.idle_seconds
        _, status, usage = os.wait4(child.pid, 0)
        self.poll.unregister(child.pidfd)
        os.close(child.pidfd)
        del self.children[child.name]
        if self.folders is not None:
            # A folder that cannot be removed must not end the other programs.
            with contextlib.suppress(OSError):
                remove_folder(child.folder)
        how, number = _how_it_ended(status)
        cpu = usage.ru_utime + usage.ru_stime - child.start_cpu_seconds
        child.busy_seconds = cpu + child.lost_seconds
        exceeded = child.limits.exceeded(cpu_seconds=cpu, wall_seconds=wall, idle_seconds=idle)
        self._send(
            ended=child.name,
            ending=exceeded or child.ending or how,
            status=number,
            cpu_seconds=cpu,
            wall_seconds=wall,
            idle_seconds=idle,
            lost_seconds=child.lost_seconds if child.losses_known else None,
        )

    def _handle_order(self) -> bool:
        message, descriptors, *_ = socket.recv_fds(self.control, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        if not message:
            return False
        order = json.loads(message)
        if "kill" in order:
            if order["kill"] in self.children:
                self.children[order["kill"]].end(Ending.KILLED)
            return True
        try:
            self._start(order, descriptors)
        except OSError as error:
            self._send(refused=order["start"], reason=str(error))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _start(self, order: dict[str, Any], descriptors: list[int]) -> None:
        taken = {child.slot for child in self.children.values()}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        if slot >= UIDS_PER_SERVER:
            raise OSError(f"{len(taken)} programs run already")
        folder = JOB_FOLDER if self.folders is None else make_folder(self.folders, order["start"])
        payload, *passed = descriptors
        assignment = Assignment(
            payload=payload,
            descriptors=dict(zip(order["numbers"], passed, strict=True)),
            limits=Limits(**order["limits"]),
            folder=folder,
            uid=None if self.owner is None else program_uid(self.owner, slot),
        )
        pid, start_cpu_seconds = self._fork(assignment)
        pidfd = os.pidfd_open(pid)
        self.poll.register(pidfd, select.POLLIN)
        child = self.children[order["start"]] = Child(
            name=order["start"],
            slot=slot,
            pid=pid,
            pidfd=pidfd,
            limits=assignment.limits,
            folder=folder,
            start_seconds=time.monotonic(),
            start_cpu_seconds=start_cpu_seconds,
            start_lost_seconds=self._server_losses(),
        )
        if order["helps"] in self.children:
            self.children[order["helps"]].helpers.append(child)
        self._send(started=order["start"])

    def _fork(self, assignment: Assignment) -> tuple[int, float]:
        """Process id and CPU seconds of a confined child that is about to run. Raises OSError if confinement fails."""
        reader, writer = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _run_child(assignment, self.shared, parent=parent, status=writer)
        os.close(writer)
        try:
            # The child writes the report in one call, and it fits into the pipe.
            answer = os.read(reader, MAX_MESSAGE_BYTES)
        finally:
            os.close(reader)
        if answer.startswith(CONFINED):
            return pid, float(answer[len(CONFINED) :])
        _, status = os.waitpid(pid, 0)
        raise OSError(answer.decode() or f"it ended while it was being confined ({_how_it_ended(status)})")

    def _send(self, **message: object) -> None:
        self.control.send(json.dumps(message).encode())


def _run_child(assignment: Assignment, shared: SharedConfinement, *, parent: int, status: int) -> NoReturn:
    try:
        status = move_up(status)
        try:
            source = confine(assignment, shared, parent=parent, status=status)
        except Exception as error:
            os.write(status, f"{type(error).__name__}: {error}"[:1000].encode(errors="replace"))
            os._exit(1)
        os.write(status, b"%s%f" % (CONFINED, time.process_time()))
        os.close(status)
        if shared.mechanisms.namespaces is not None:
            set_home(assignment.folder)
        run_as_main(source, assignment.folder)
    finally:
        os._exit(1)


def _how_it_ended(status: int) -> tuple[Ending, int]:
    if os.WIFSIGNALED(status):
        return Ending.SIGNAL, os.WTERMSIG(status)
    code = os.WEXITSTATUS(status)
    return Ending.MEMORY if code == OUT_OF_MEMORY_STATUS else Ending.EXIT, code


def make_folder_of_folders(parent: str) -> str:
    """Creates a folder in `parent` that only this user can enter."""
    path = f"{parent}/proximo-sandbox-{os.getpid()}-{os.urandom(8).hex()}"
    os.mkdir(path, 0o700)
    return path


def make_folder(parent: str, name: int) -> str:
    """Creates the empty folder of a program."""
    path = f"{parent}/{name}"
    os.mkdir(path, 0o700)
    return path


def folder_exceeds(folder: str, *, num_bytes: int) -> bool:
    """True if the contents take more bytes, are too many files, or are nested beyond the length of a path."""
    taken, count, waiting = 0, 0, [folder]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    count += 1
                    taken += entry.stat(follow_symlinks=False).st_blocks * 512
                    if count > MAX_FILES or taken > num_bytes:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except FileNotFoundError:
            # The program removed it in the meantime.
            continue
        except OSError:
            return True
    return False


def remove_folder(folder: str) -> None:
    """Removes a folder of any depth, by moving the contents of subfolders to the top until none is left."""
    left = True
    while left:
        left = False
        with os.scandir(folder) as entries:
            contents = list(entries)
        for entry in contents:
            if entry.is_dir(follow_symlinks=False):
                _empty_into(folder, entry.path)
                left = True
            else:
                os.unlink(entry.path)
    os.rmdir(folder)


def _empty_into(top: str, folder: str) -> None:
    os.chmod(folder, 0o700)
    with os.scandir(folder) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)
            os.rename(entry.path, f"{top}/{os.urandom(8).hex()}")
    os.rmdir(folder)
