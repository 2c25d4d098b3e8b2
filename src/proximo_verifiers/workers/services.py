"""What a worker process serves: the grades of a verifier. Other services are found by their import paths as well."""

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

from proximo_verifiers.callables import calling_problem, methods_problem
from proximo_verifiers.errors import ConfigError, DataError, VerifierError
from proximo_verifiers.verifier import Answer, Finish, Grade, ScoreState

Service = Callable[[Mapping[str, Any]], Any]
"""Maps a request to the value of its reply."""
ReadyService = tuple[Service, Any, Callable[[], Any]]
"""(service, value to send when it is ready, function that closes it)."""
MakeService = Callable[[str, Mapping[str, Any]], ReadyService]
"""Makes the service of an import path and options."""
VERIFIER_SERVICE = "proximo_verifiers.workers.services:verifier_service"
VERIFIER_METHODS = ("grade(answer)", "check_row(reference=..., metadata=...)", "close()")
REASON_CHARACTERS = 300


class NotGradedError(VerifierError):
    """The verifier reported a fault of the infrastructure; treated as an exception of the verifier."""


def verifier_service(path: str, options: Mapping[str, Any]) -> ReadyService:
    """Makes a verifier. The ready value is its grade for an answer that took too long, or None."""
    make = find_callable(path)
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
        "reason": None if grade.reason is None else one_line(grade.reason),
        "components": numbers,
        "by_clock": grade.by_clock,
    }


def find_callable(path: str) -> Callable[..., Any]:
    """Imports `package.module:name`. Raises ConfigError if it is missing or not callable."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            raise ConfigError(f"{path!r}: there is no module {error.name!r} that a worker could import") from error
        raise
    target = getattr(module, name, None)
    if not callable(target):
        raise ConfigError(f"{path!r}: {module_name} has nothing callable named {name!r}")
    return target


def one_line(text: str) -> str:
    """The first line of a text, cut at REASON_CHARACTERS."""
    first = encodable(text.strip()).splitlines()[0] if text.strip() else ""
    return first if len(first) <= REASON_CHARACTERS else first[:REASON_CHARACTERS] + "..."


def encodable(text: str) -> str:
    """The text with lone surrogates, which UTF-8 cannot encode, replaced by question marks."""
    return text.encode(errors="replace").decode()
