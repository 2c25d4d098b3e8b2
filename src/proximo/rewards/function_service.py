"""The service of a worker process that calls a reward function."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from proximo.rewards.calling.binding import BoundFunction
from proximo_verifiers.workers.services import ReadyService, find_callable

FUNCTION_SERVICE = "proximo.rewards.function_service:function_service"


def function_service(path: str, options: Mapping[str, Any]) -> ReadyService:
    """A reward function. The ready value is what it wants of the columns of a row."""
    bound = BoundFunction(find_callable(path), options, name=repr(path))

    def serve(request: Mapping[str, Any]) -> Any:
        results = bound(**request["call"], columns=request["columns"])
        if hasattr(results, "tolist"):  # numpy arrays and tensors
            results = results.tolist()
        return json.loads(json.dumps(results, default=lambda value: value.tolist()))

    return serve, asdict(bound.wanted), bound.close
