"""The interface of the sandbox: starts programs, reads their output, waits for them."""

import math
import os
import select
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from types import TracebackType
from typing import Any, Self

from proximo_verifiers.errors import SandboxError
from proximo_verifiers.sandbox.client import ANSWER_SECONDS, ForkServerClient
from proximo_verifiers.sandbox.guarantees import check_names, refuse_missing
from proximo_verifiers.sandbox.jobs import MIB, Ending, Job, Limits, Outcome, Program
from proximo_verifiers.sandbox.mechanisms import Mechanisms
from proximo_verifiers.sandbox.payload import check_program, open_payload, open_stdin

GRACE_SECONDS = 60.0
"""Time beyond the wall limit of a program after which the fork server is considered dead."""
CHUNK_BYTES = 1 << 16
IMPORT_LIMITS = Limits(cpu_seconds=30.0, wall_seconds=300.0, memory_bytes=1024 * MIB)
"""Limits of the program that imports a package once at the start, perhaps from a cold disk."""
LIMITS = tuple(item.name for item in fields(Limits))


class SandboxJob:
    """A program that was started in a `Sandbox`."""

    def __init__(self, sandbox: "Sandbox", name: int, program: Program, outputs: tuple[int, int]) -> None:
        self.name = name
        self.limits = program.limits
        self.deadline = math.inf
        """Time after which it should have ended; set when it has started."""
        self.end: Mapping[str, Any] | None = None
        """The report of the fork server on its end."""
        self.failure: str | None = None
        """The reason why there will be no report."""
        self._sandbox = sandbox
        self._outputs = {descriptor: bytearray() for descriptor in outputs}
        self._open = set(outputs)
        self._flooded = False

    @property
    def is_over(self) -> bool:
        """True if the program has ended."""
        return self.end is not None or self.failure is not None

    @property
    def open_outputs(self) -> frozenset[int]:
        """Descriptors of the output streams that are still open."""
        return frozenset(self._open)

    def wait(self) -> Outcome:
        """Waits until the program has ended, for about `limits.wall_seconds` at most.

        Raises SandboxError if the end could not be observed, or had another cause than the program or its limits.
        """
        self._sandbox.wait_for(self)
        if self.end is None:
            raise SandboxError(f"the outcome of a program is unknown: {self.failure}")
        ending = Ending(self.end["ending"])
        if ending is Ending.SIGNAL and self.end["status"] == 9:
            raise SandboxError("the kernel killed a program that was within its limits: the machine is out of memory")
        stdout, stderr = (bytes(output[: self.limits.output_bytes]) for output in self._outputs.values())
        return Outcome(
            # Output is deterministic and time is not, so the output limit takes precedence.
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
        """Kills the program; `wait` then reports it. May be called while another thread waits."""
        if not self.is_over:
            self._sandbox.kill(self.name)

    def read(self, descriptor: int) -> bool:
        """Reads a chunk of an output stream. Returns False if there is none now."""
        try:
            chunk = os.read(descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self._open.discard(descriptor)
            os.close(descriptor)
            return False
        taken = self._outputs[descriptor]
        # Read beyond the limit as well, so that the pipe drains, but drop the bytes.
        taken += chunk[: self.limits.output_bytes + 1 - len(taken)]
        if len(taken) > self.limits.output_bytes and not self._flooded:
            self._flooded = True
            self.kill()
        return True

    def finish(self, *, end: Mapping[str, Any] | None = None, failure: str | None = None) -> None:
        """Reads the rest of the pipes and closes them."""
        self.end, self.failure = end, failure
        for descriptor in list(self._open):
            while self.read(descriptor):
                pass
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()


class Sandbox:
    """Runs Python programs under the guarantees of docs/sandbox.md. Used from one thread; close it, or use `with`.

    `waived` names guarantees to do without; SandboxError is raised for any other that this machine cannot give.
    `without` names mechanisms (mechanisms.py) not to use, as on a machine that lacks them. `preload` names modules of
    this package that programs may import although they cannot read its files; they may use the standard library only.
    `packages` names modules of installed packages (`numpy`) that programs may import; SandboxError is raised if one is
    not installed or cannot be imported in the sandbox.
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
        """The confinement mechanisms of this machine."""
        return Mechanisms(**self._server.hello["mechanisms"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(self, program: Program, *, helps: Job | None = None) -> SandboxJob:
        """Starts a program. While it is busy, the program that it `helps` does not count as idle.

        Raises ValueError for an invalid program, SandboxError if it cannot be started.
        """
        check_program(program)
        if not self._server.alive:
            self._server = self._connect()
        name = self._started = self._started + 1
        passed = [open_payload(program), open_stdin(program.stdin)]
        outputs = []
        for _ in range(2):
            reader, writer = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(reader, False)
            outputs.append(reader)
            passed.append(writer)
        numbers = [0, 1, 2, *program.descriptors]
        limits = {name: getattr(program.limits, name) for name in LIMITS}
        order = {"start": name, "numbers": numbers, "limits": limits, "helps": helps.name if helps else 0}
        job = self._jobs[name] = SandboxJob(self, name, program, (outputs[0], outputs[1]))
        try:
            self._server.send(order, [*passed, *program.descriptors.values()])
            self._wait_for_start(job)
        except OSError as error:
            self._fail_all(f"the fork server has ended: {error}")
        finally:
            for descriptor in passed:
                os.close(descriptor)
        if job.failure is not None:
            raise SandboxError(f"a program could not be started: {job.failure}")
        return job

    def run(self, program: Program) -> Outcome:
        """Starts a program and waits for its end."""
        return self.start(program).wait()

    def close(self) -> None:
        """Ends every running program."""
        if self._server.alive:
            self._fail_all("the sandbox was closed")

    def kill(self, name: int) -> None:
        """Kills a job, for `SandboxJob.kill`."""
        # If the fork server has ended, `wait_for` reports it.
        with suppress(OSError):
            self._server.send({"kill": name})

    def wait_for(self, job: SandboxJob) -> None:
        """Handles messages and output of all programs until this one has ended."""
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
                error = tried.stderr.decode(errors="replace").strip().rpartition("\n")[2]
                raise SandboxError(f"package {name!r} cannot be imported in the sandbox: {error or tried.ending.value}")

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
        """Waits for a message or output of any program, and handles it."""
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
        """Ends the fork server and fails all its programs. The next start makes a new server."""
        last_words = self._server.end() if self._server.alive else ""
        for job in self._jobs.values():
            job.finish(failure=f"{why}. {last_words}".strip())
        self._jobs.clear()
