"""The sandbox as its caller has it: starts programs, takes their output, waits. Not what confines them:
inside/child.py.
"""

import math
import os
import select
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from types import TracebackType
from typing import Any, Self

from proximo.errors import SandboxError
from proximo.sandbox.client import ANSWER_SECONDS, ForkServerClient
from proximo.sandbox.guarantees import check_names, refuse_missing
from proximo.sandbox.jobs import MIB, Ending, Job, Limits, Outcome, Program
from proximo.sandbox.mechanisms import Mechanisms
from proximo.sandbox.payload import check_program, open_payload, open_stdin

GRACE_SECONDS = 10.0
"""Beyond a program's wall limit, after which not the program is at fault but what watches it."""
CHUNK_BYTES = 1 << 16
IMPORT_LIMITS = Limits(cpu_seconds=30.0, wall_seconds=300.0, memory_bytes=1024 * MIB)
"""Of the program that imports a package, perhaps from a disk that has not read it before."""
LIMITS = tuple(each.name for each in fields(Limits))


class SandboxJob:
    """A program that runs in a `Sandbox`."""

    def __init__(self, sandbox: "Sandbox", name: int, program: Program, outputs: tuple[int, int]) -> None:
        self.name = name
        self.limits = program.limits
        self.deadline = math.inf
        """Known when it has started."""
        self.end: Mapping[str, Any] | None = None
        """What the fork server says of its end."""
        self.failure: str | None = None
        """Why there will be no such word."""
        self._sandbox = sandbox
        self._outputs = {descriptor: bytearray() for descriptor in outputs}
        self._open = set(outputs)
        self._flooded = False

    @property
    def is_over(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.end is not None or self.failure is not None

    @property
    def open_outputs(self) -> frozenset[int]:
        """Descriptors of standard streams that may have more to give."""
        return frozenset(self._open)

    def wait(self) -> Outcome:
        """Waits for its end, for `limits.wall_seconds` at most; nothing of the program is left after it.

        Raises SandboxError where the end could not be seen, or was no doing of the program or of its limits.
        """
        self._sandbox.wait_for(self)
        if self.end is None:
            raise SandboxError(f"what became of a program is not known: {self.failure}")
        ending = Ending(self.end["ending"])
        if ending is Ending.SIGNAL and self.end["status"] == 9:
            raise SandboxError("the kernel killed a program that was within its limits: the machine is out of memory")
        stdout, stderr = (bytes(each[: self.limits.output_bytes]) for each in self._outputs.values())
        return Outcome(
            # Bytes are counted and times measured: what it wrote is the same in every run.
            ending=Ending.OUTPUT if self._flooded else ending,
            status=self.end["status"],
            stdout=stdout,
            stderr=stderr,
            cpu_seconds=self.end["cpu_seconds"],
            wall_seconds=self.end["wall_seconds"],
            idle_seconds=self.end["idle_seconds"],
            lost_seconds=self.end["lost_seconds"],
        )

    def kill(self) -> None:
        """Ends it and whatever it started; `wait` then says so. May be called while another thread waits."""
        if not self.is_over:
            self._sandbox.kill(self.name)

    def read(self, descriptor: int) -> bool:
        """Takes a piece of what a standard stream has to give; False where there is nothing now."""
        try:
            chunk = os.read(descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self._open.discard(descriptor)
            os.close(descriptor)
            return False
        taken = self._outputs[descriptor]
        # What lies beyond the limit is taken, so that the pipe runs dry, and dropped.
        taken += chunk[: self.limits.output_bytes + 1 - len(taken)]
        if len(taken) > self.limits.output_bytes and not self._flooded:
            self._flooded = True
            self.kill()
        return True

    def finish(self, *, end: Mapping[str, Any] | None = None, failure: str | None = None) -> None:
        """Takes what is left in the pipes, and closes them."""
        self.end, self.failure = end, failure
        for descriptor in list(self._open):
            while self.read(descriptor):
                pass
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()


class Sandbox:
    """Runs Python programs under the guarantees of docs/sandbox.md. Used from one thread; close it, or use `with`.

    Raises SandboxError where this machine cannot give a guarantee that is not in `waived`. `without` names means of
    confinement (mechanisms.py) to do without, as on a machine that does not have them. `preload` names modules of this
    package that programs may import, though they can read nothing of it: they need the standard library alone.
    `packages` names modules of installed packages (`numpy`) that programs may import beside the library; SandboxError
    where one is not installed, or cannot be imported in the sandbox.
    """

    def __init__(
        self,
        *,
        waived: Collection[str] = (),
        without: Collection[str] = (),
        preload: Sequence[str] = (),
        packages: Collection[str] = (),
    ) -> None:
        check_names(waived, without)
        self._waived = frozenset(waived)
        self._without = frozenset(without)
        self._preload = tuple(preload)
        self._jobs: dict[int, SandboxJob] = {}
        self._started = 0
        self._packages = tuple(packages)
        self._server = self._connect()
        self._try_packages()

    @property
    def mechanisms(self) -> Mechanisms:
        """What this machine has to confine programs with."""
        return Mechanisms(**self._server.hello["mechanisms"])

    @property
    def python_version(self) -> str:
        """Of the interpreter that runs the programs."""
        return self._server.hello["python"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(self, program: Program, *, helps: Job | None = None) -> SandboxJob:
        """Raises ValueError for a program that cannot be meant, and SandboxError where none can be started.

        While it works, a program that it `helps` is not idle.
        """
        check_program(program)
        if not self._server.alive:
            self._server = self._connect()
        name = self._started = self._started + 1
        given = [open_payload(program), open_stdin(program.stdin)]
        outputs = []
        for _ in range(2):
            reader, writer = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(reader, False)
            outputs.append(reader)
            given.append(writer)
        numbers = [0, 1, 2, *program.descriptors]
        limits = {each: getattr(program.limits, each) for each in LIMITS}
        order = {"start": name, "numbers": numbers, "limits": limits, "helps": helps.name if helps else 0}
        job = self._jobs[name] = SandboxJob(self, name, program, (outputs[0], outputs[1]))
        try:
            self._server.send(order, [*given, *program.descriptors.values()])
            self._wait_for_start(job)
        except OSError as error:
            self._fail_all(f"the fork server has ended: {error}")
        finally:
            for descriptor in given:
                os.close(descriptor)
        if job.failure is not None:
            raise SandboxError(f"a program could not be started: {job.failure}")
        return job

    def run(self, program: Program) -> Outcome:
        """Starts it and waits for its end."""
        return self.start(program).wait()

    def close(self) -> None:
        """Ends every program that still runs."""
        if self._server.alive:
            self._fail_all("the sandbox was closed")

    def kill(self, name: int) -> None:
        """Of a job: `SandboxJob.kill`."""
        # Whoever waits for the job sees where the fork server is gone.
        with suppress(OSError):
            self._server.send({"kill": name})

    def wait_for(self, job: SandboxJob) -> None:
        """Serves all programs until this one is over."""
        while not job.is_over:
            if time.monotonic() > job.deadline:
                self._fail_all("it did not end at its limits")
            self._serve(job.deadline)

    def _connect(self) -> ForkServerClient:
        client = ForkServerClient(without=self._without, preload=self._preload, modules=self._packages)
        try:
            refuse_missing(Mechanisms(**client.hello["mechanisms"]), self._waived)
        except SandboxError:
            client.end()
            raise
        return client

    def _try_packages(self) -> None:
        for name in self._packages:
            tried = self.run(Program(source=f"import {name}", limits=IMPORT_LIMITS))
            if (tried.ending, tried.status) != (Ending.EXIT, 0):
                self.close()
                said = tried.stderr.decode(errors="replace").strip().rpartition("\n")[2]
                raise SandboxError(f"package {name!r} cannot be imported in the sandbox: {said or tried.ending.value}")

    def _wait_for_start(self, job: SandboxJob) -> None:
        deadline = time.monotonic() + ANSWER_SECONDS
        while not job.is_over:
            message = self._server.receive(deadline)
            if message is None:
                self._fail_all("the fork server has ended, or does not answer")
            elif message.get("started") == job.name:
                job.deadline = time.monotonic() + job.limits.wall_seconds + GRACE_SECONDS
                return
            else:
                self._on_message(message)

    def _serve(self, deadline: float) -> None:
        """Waits for a message or output of any program, and takes it."""
        if not self._server.alive:
            return
        owners = {descriptor: job for job in self._jobs.values() for descriptor in job.open_outputs}
        waiting = select.poll()
        for descriptor in (self._server.control.fileno(), *owners):
            waiting.register(descriptor, select.POLLIN)
        ready = {number for number, _ in waiting.poll(max(0.0, deadline - time.monotonic()) * 1000)}
        for descriptor in ready & owners.keys():
            owners[descriptor].read(descriptor)
        if self._server.alive and self._server.control.fileno() in ready:
            message = self._server.receive(deadline)
            if message is None:
                self._fail_all("the fork server has ended")
            else:
                self._on_message(message)

    def _on_message(self, message: Mapping[str, Any]) -> None:
        if "ended" in message:
            self._jobs.pop(message["ended"]).finish(end=message)
        elif "refused" in message:
            self._jobs.pop(message["refused"]).finish(failure=message["reason"])

    def _fail_all(self, why: str) -> None:
        """The fork server and with it all programs are given up; the next start makes a new one."""
        last_words = self._server.end() if self._server.alive else ""
        for job in self._jobs.values():
            job.finish(failure=f"{why}. {last_words}".strip())
        self._jobs.clear()
