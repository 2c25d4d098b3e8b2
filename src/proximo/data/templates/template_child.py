"""Renders chat templates in a separate process: `renderer.py` starts it as a program. It imports only jinja2.

A template is code from a model's folder. jinja2's sandbox keeps it from the interpreter, and the kernel limits its time
and memory. Requests and replies are JSON, one per line. The environment is that of transformers'
`apply_chat_template`, so that every template of the Hub renders the same here.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates read the reasoning of a message."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text; it is rendered like any other text."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

    def _as_it_is(self, caller: Callable[[], str]) -> str:
        return caller()


class _PlainNamespace(Namespace):
    """A namespace without attributes, which could give access to the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *positional = args
        attributes = dict(*positional, **kwargs)
        for name in attributes:
            _refuse_hidden(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_hidden(name)
        super().__setitem__(name, value)


def _refuse_hidden(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}")


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """A function in place of the class, whose attributes could give access to the interpreter."""
    return dict(*args, **kwargs)


def _as_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _as_json
    functions: dict[str, Any] = {
        "raise_exception": _raise,
        "strftime_now": _now,
        "dict": _dict,
        "namespace": _PlainNamespace,
    }
    environment.globals.update(functions)
    return environment.from_string(template)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under each name that templates use."""
    said = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if said is None else {"thinking": said, **message, "reasoning_content": said}


def _reply(request: dict[str, Any]) -> dict[str, Any]:
    variables = request["variables"]
    messages = [_with_reasoning(message) for message in variables.pop("messages")]
    try:
        return {"text": _compiled(request["template"]).render(messages=messages, **variables)}
    except MemoryError:
        return {"over": "memory"}
    except TemplateSyntaxError as error:
        return {"error": error.message or "it cannot be read", "line": error.lineno}
    except Exception as error:  # any error of a template is its answer
        return {"error": str(error) or type(error).__name__}


def main(cpu_seconds: int, memory_bytes: int) -> None:
    """Answer requests until there are no more."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):  # some systems have no limit of the address space
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    for line in sys.stdin.buffer:
        spent = int(time.process_time()) + 1
        # Beyond it the kernel ends the process, even inside a loop.
        resource.setrlimit(resource.RLIMIT_CPU, (spent + cpu_seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        sys.stdout.write(json.dumps(_reply(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
