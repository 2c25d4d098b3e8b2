"""The worker process: makes a verifier, or imports a function, and answers requests until its pipe ends.

Run as `python -m proximo.rewards.workers.main REQUESTS REPLIES PARENT`, with two descriptors and the id of the parent
process. The first message says what to make. Each later message is a request and gets one reply, in order. The worker
does not import torch, so it starts in about 0.1 s.
"""

import ctypes
import importlib
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, BinaryIO

from proximo.callables import calling_problem, methods_problem
from proximo.enums import Finish, ScoreState
from proximo.errors import ConfigError, DataError, ProximoError
from proximo.rewards.verifier import Answer, Grade, PostponedError
from proximo.rewards.workers.frames import encode, read_frame

Service = Callable[[Mapping[str, Any]], Any]
"""Maps a request to the value of its reply."""
ReadyService = tuple[Service, Any, Callable[[], Any]]
"""(service, value to send when it is ready, function that closes it)."""
VERIFIER_METHODS = ("grade(answer)", "check_row(reference=..., metadata=...)", "close()")
REASON_CHARACTERS = 300
_PR_SET_PDEATHSIG = 1


class NotGradedError(ProximoError):
    """The verifier reported a fault of the infrastructure; treated as an exception of the verifier."""


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
            service, about, close = SERVICES[wanted["service"]](wanted["path"], wanted["options"])
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


def verifier_service(path: str, options: Mapping[str, Any]) -> ReadyService:
    """Makes a verifier. The ready value is its grade for an answer that took too long, or None."""
    make = _find(path)
    if problem := calling_problem(make, keywords=options):
        raise ConfigError(f"{path!r} is called with {', '.join(options) or 'no options'}, but {problem}")
    verifier = make(**options)
    late = ("timeout_grade()",) if hasattr(verifier, "timeout_grade") else ()
    if problem := methods_problem(verifier, (*VERIFIER_METHODS, *late)):
        raise ConfigError(f"{path!r} must make a verifier ({', '.join(VERIFIER_METHODS)}), but {problem}")

    def serve(request: Mapping[str, Any]) -> Any:
        if "check" in request:
            try:
                verifier.check_row(**request["check"])
            except DataError as error:
                return str(error)
            return None
        fields = request["grade"]
        first_turn = not request.get("postponed", False)
        grade = verifier.grade(Answer(**(fields | {"finish": Finish(fields["finish"]), "first_turn": first_turn})))
        if not isinstance(grade, Grade):
            raise TypeError(f"grade(answer) must return a Grade, it returned {grade!r:.60}")
        if grade.state is ScoreState.INFRASTRUCTURE_FAULT:
            raise NotGradedError(grade.reason or "the verifier gave no reason")
        return grade_as_json(grade)

    about = None
    if hasattr(verifier, "timeout_grade"):
        about = grade_as_json(verifier.timeout_grade())
    return serve, about, verifier.close


def function_service(path: str, options: Mapping[str, Any]) -> ReadyService:
    """A reward function. The ready value is what it wants of the columns of a row."""
    from proximo.rewards.calling.binding import BoundFunction  # asyncio, which a verifier need not wait for

    bound = BoundFunction(_find(path), options, name=repr(path))

    def serve(request: Mapping[str, Any]) -> Any:
        results = bound(**request["call"], columns=request["columns"])
        if hasattr(results, "tolist"):  # numpy arrays and tensors
            results = results.tolist()
        return json.loads(json.dumps(results, default=lambda value: value.tolist()))

    return serve, asdict(bound.wanted), bound.close


SERVICES: Mapping[str, Callable[[str, Mapping[str, Any]], ReadyService]] = {
    "verifier": verifier_service,
    "function": function_service,
}


def grade_as_json(grade: Grade) -> dict[str, Any]:
    """The grade as it is sent to the parent; with 0 where it has no score. Raises ValueError for a number that is not
    finite."""
    numbers = {"score": float(grade.score)} | {name: float(value) for name, value in grade.components.items()}
    if not grade.state.has_score:
        numbers = {"score": 0.0}
    invalid = [name for name, number in numbers.items() if not math.isfinite(number)]
    if invalid:
        raise ValueError(f"the verifier said {grade.state.value} with a {invalid[0]} of {numbers[invalid[0]]}")
    return {
        "score": numbers.pop("score"),
        "state": grade.state.value,
        "reason": None if grade.reason is None else _line(grade.reason),
        "components": numbers,
        "by_clock": grade.by_clock,
    }


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


def _find(path: str) -> Callable[..., Any]:
    """Imports `package.module:name`. Raises ConfigError if it is missing or not callable."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            raise ConfigError(f"{path!r}: there is no module {error.name!r} that a worker could import") from error
        raise
    target = vars(module).get(name)
    if not callable(target):
        raise ConfigError(f"{path!r}: {module_name} has nothing callable named {name!r}")
    return target


def _kind(error: BaseException) -> str:
    return type(error).__name__ if isinstance(error, ProximoError) else "ConfigError"


def _described(error: BaseException) -> str:
    return _encodable(str(error)) if isinstance(error, ProximoError) else _line(f"{type(error).__name__}: {error}")


def _line(text: str) -> str:
    first = _encodable(text.strip()).splitlines()[0] if text.strip() else ""
    return first if len(first) <= REASON_CHARACTERS else first[:REASON_CHARACTERS] + "..."


def _encodable(text: str) -> str:
    """The text with lone surrogates, which UTF-8 cannot encode, replaced by question marks."""
    return text.encode(errors="replace").decode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
