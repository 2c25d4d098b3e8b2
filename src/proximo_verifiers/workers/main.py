"""The worker process: makes a service, such as a verifier, and answers requests until its pipe ends.

Run as `python -m proximo_verifiers.workers.main REQUESTS REPLIES PARENT`, with two descriptors and the id of the parent
process. The first message says what to make. Each later message is a request and gets one reply, in order. The worker
does not import torch, so it starts in about 0.1 s.
"""

import ctypes
import os
import resource
import signal
import sys
import time
from typing import BinaryIO

from proximo_verifiers.errors import VerifierError
from proximo_verifiers.verifier import PostponedError
from proximo_verifiers.workers.frames import encode, read_frame
from proximo_verifiers.workers.services import MakeService, Service, encodable, find_callable, one_line

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Serves until the pipe ends. Returns the exit status."""
    requests_fd, replies_fd, parent = map(int, arguments)
    for descriptor in (requests_fd, replies_fd):
        os.set_inheritable(descriptor, False)  # processes of a verifier must not reach the channel
    die_with(parent)
    with open(requests_fd, "rb") as requests, open(replies_fd, "wb", buffering=0) as replies:
        wanted = read_frame(requests)
        if wanted is None:
            return 0
        try:
            _limit_memory(wanted["memory_bytes"])
            make: MakeService = find_callable(wanted["service"])
            service, about, close = make(wanted["path"], wanted["options"])
        except BaseException as error:  # user code may raise anything, and the parent must know
            replies.write(encode({"failed": _kind(error), "message": _described(error)}))
            return 1
        replies.write(encode({"ready": about}))
        _serve(service, requests, replies)
        close()
    return 0


def die_with(parent: int) -> None:
    """Has the Linux kernel kill this process, and its forks, when the parent ends in any way."""
    if sys.platform != "linux":
        return  # elsewhere the end of the pipe ends the worker, after its current answer
    libc = ctypes.CDLL(None)

    own = os.getpid()

    def follow(process: int) -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() not in (process, 0):  # it ended before prctl was called; 0: it is in another PID namespace
            os._exit(1)

    def follow_as_child() -> None:
        nonlocal own
        process, own = own, os.getpid()
        follow(process)

    follow(parent)
    os.register_at_fork(after_in_child=follow_as_child)


def _serve(service: Service, requests: BinaryIO, replies: BinaryIO) -> None:
    own = os.getpid()
    while (request := read_frame(requests)) is not None:
        start = time.perf_counter()
        leaving = False
        try:
            reply = encode({"value": service(request), "seconds": time.perf_counter() - start})
        except PostponedError:
            reply = encode({"postponed": True})
        except BaseException as error:  # a verifier that raises fails its answer, not the worker
            leaving = isinstance(error, MemoryError)  # memory is exhausted, so the worker is replaced
            reply = encode({"raised": _described(error), "leaving": leaving})
        if os.getpid() != own:  # a fork of the verifier returned here as well
            os._exit(1)
        _write(replies, reply)
        if leaving:
            return


def _write(stream: BinaryIO, piece: bytes) -> None:
    rest = memoryview(piece)
    while rest:
        rest = rest[stream.write(rest) :]


def _limit_memory(memory_bytes: int | None) -> None:
    """Limits the address space of this process and of all that it starts, on Linux."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes is None or sys.platform != "linux":
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _kind(error: BaseException) -> str:
    """The name of the error of this package that it is, perhaps by inheritance; ConfigError where it is none."""
    ours = (each.__name__ for each in type(error).__mro__ if each.__module__ == VerifierError.__module__)
    return next(ours, "ConfigError")


def _described(error: BaseException) -> str:
    return encodable(str(error)) if isinstance(error, VerifierError) else one_line(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
