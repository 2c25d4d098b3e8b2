"""The worker process: makes one verifier (or finds one function) and answers requests until its pipe ends.

`python -m proximo.rewards.workers.main REQUESTS REPLIES PARENT`: two descriptors and the id of the process that started
it. The first message says what to make; each one after it asks for something and gets one reply, in order. Needs no
torch, so that it starts in about 0.1 s.
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
from typing import Any, BinaryIO

from proximo.callables import calling_problem, methods_problem
from proximo.enums import Finish, ScoreState
from proximo.errors import ConfigError, DataError, ProximoError
from proximo.rewards.verifier import Answer, Grade, PostponedError
from proximo.rewards.workers.frames import encode, read_frame

Service = Callable[[Mapping[str, Any]], Any]
"""From a request to the value of its reply."""
Made = tuple[Service, Any, Callable[[], Any]]
"""A service, what there is to say of it when it is ready, and what ends it."""
VERIFIER_METHODS = ("grade(answer)", "check_row(reference=..., metadata=...)", "close()")
REASON_CHARACTERS = 300
_PR_SET_PDEATHSIG = 1


class NotGradedError(ProximoError):
    """A verifier said itself that the infrastructure is at fault: as good as if it had raised."""


def main(arguments: list[str]) -> int:
    """Serve until the pipe ends; returns the exit status."""
    requests_fd, replies_fd, parent = map(int, arguments)
    for descriptor in (requests_fd, replies_fd):
        os.set_inheritable(descriptor, False)  # what a verifier starts has no business with the channel
    die_with(parent)
    with open(requests_fd, "rb") as requests, open(replies_fd, "wb", buffering=0) as replies:
        wanted = read_frame(requests)
        if wanted is None:
            return 0
        try:
            _limit_memory(wanted["memory_bytes"])
            service, about, close = SERVICES[wanted["service"]](wanted["path"], wanted["options"])
        except BaseException as error:  # it is anybody's code that is imported here, and the trainer must hear of it
            replies.write(encode({"failed": _kind(error), "message": _described(error)}))
            return 1
        replies.write(encode({"ready": about}))
        _serve(service, requests, replies)
        close()
    return 0


def die_with(parent: int) -> None:
    """On Linux the kernel kills this process, and what it forks, when the one that started it ends, however it does."""
    if sys.platform != "linux":
        return  # there the end of the pipe ends a worker, after the answer that it is grading
    libc = ctypes.CDLL(None)

    def kill_when_the_parent_ends() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    kill_when_the_parent_ends()
    os.register_at_fork(after_in_child=kill_when_the_parent_ends)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def verifier_service(path: str, options: Mapping[str, Any]) -> Made:
    """A verifier at work, and the grade that it wants for an answer on which it was killed for taking too long."""
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
        given = request["grade"]
        first_turn = not request.get("postponed", False)
        grade = verifier.grade(Answer(**(given | {"finish": Finish(given["finish"]), "first_turn": first_turn})))
        if not isinstance(grade, Grade):
            raise TypeError(f"grade(answer) must return a Grade, it returned {grade!r:.60}")
        if grade.state is ScoreState.INFRASTRUCTURE_FAULT:
            raise NotGradedError(grade.reason or "the verifier gave no reason")
        return grade_as_json(grade)

    about = None
    if hasattr(verifier, "timeout_grade"):
        about = grade_as_json(verifier.timeout_grade())
    return serve, about, verifier.close


def function_service(path: str, options: Mapping[str, Any]) -> Made:
    """A reward function of lists of prompts, responses and metadata (docs/rewards.md)."""
    function = _find(path)
    if problem := calling_problem(function, ([], [], []), options):
        given = "".join(f", {key}=..." for key in options)
        raise ConfigError(f"{path!r} is called as function(prompts, responses, metadata{given}), but {problem}")

    def serve(request: Mapping[str, Any]) -> Any:
        grades = function(*request["call"], **options)
        if hasattr(grades, "tolist"):  # arrays of numpy and tensors
            grades = grades.tolist()
        return json.loads(json.dumps(grades, default=lambda value: value.tolist()))

    return serve, None, lambda: None


SERVICES: Mapping[str, Callable[[str, Mapping[str, Any]], Made]] = {
    "verifier": verifier_service,
    "function": function_service,
}


def grade_as_json(grade: Grade) -> dict[str, Any]:
    """As it crosses to the trainer. Raises ValueError for a score that is no number although the state says so."""
    numbers = {"score": float(grade.score)} | {name: float(value) for name, value in grade.components.items()}
    wrong = [name for name, number in numbers.items() if not math.isfinite(number)]
    if wrong:
        raise ValueError(f"the verifier said {grade.state.value} with a {wrong[0]} of {numbers[wrong[0]]}")
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
        except BaseException as error:  # a verifier that raises costs its answer, not the worker
            leaving = isinstance(error, MemoryError)  # what is left of its memory is no place to grade in
            reply = encode({"raised": _described(error), "leaving": leaving})
        if os.getpid() != own:  # a verifier that forked and came back twice
            os._exit(1)
        _write(replies, reply)
        if leaving:
            return


def _write(stream: BinaryIO, piece: bytes) -> None:
    rest = memoryview(piece)
    while rest:
        rest = rest[stream.write(rest) :]


def _limit_memory(memory_bytes: int | None) -> None:
    """Of its address space, and of that of everything it starts; where the system knows such a limit."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes is None or sys.platform != "linux":
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _find(path: str) -> Callable[..., Any]:
    """What stands behind `package.module:name`. Raises ConfigError where there is no such thing to call."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            raise ConfigError(f"{path!r}: there is no module {error.name!r} that a worker could import") from error
        raise
    found = vars(module).get(name)
    if not callable(found):
        raise ConfigError(f"{path!r}: {module_name} has nothing callable of the name {name!r}")
    return found


def _kind(error: BaseException) -> str:
    return type(error).__name__ if isinstance(error, ProximoError) else "ConfigError"


def _described(error: BaseException) -> str:
    return _sayable(str(error)) if isinstance(error, ProximoError) else _line(f"{type(error).__name__}: {error}")


def _line(text: str) -> str:
    first = _sayable(text.strip()).splitlines()[0] if text.strip() else ""
    return first if len(first) <= REASON_CHARACTERS else first[:REASON_CHARACTERS] + "..."


def _sayable(text: str) -> str:
    """Half of a surrogate pair, which a program can print and UTF-8 cannot say, becomes a question mark."""
    return text.encode(errors="replace").decode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
