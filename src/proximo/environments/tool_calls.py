"""Calls of tools in what a policy wrote, in the styles of model families. Runs no tool.

A call that cannot be read is no error of the run: the policy is told why, and how to write it, and it is counted. The
thought before the last `</think>` calls nothing.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from proximo.errors import ConfigError

if TYPE_CHECKING:  # torch, which worker processes do without
    from proximo.records import Message

ToolStyle = Literal["hermes", "qwen_coder", "llama", "mistral", "glm"]
"""How a family writes calls: Hermes, Qwen2.5 and Qwen3; Qwen3-Coder; Llama 3; Mistral; GLM."""
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions in OpenAI's form, as chat templates take them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call that could be read."""

    name: str
    arguments: Mapping[str, Any]
    id: str
    """The policy's own, or one of nine characters, which templates of Mistral ask for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolTurn:
    """A turn of the policy, with its calls apart from its words."""

    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    """For each call that could not be read, what the policy is told."""
    text: str = ""
    """The words outside calls, after the thought."""

    def message(self, whole: str) -> "Message":
        """The turn as a message: its calls apart from its words; `whole`, all that it wrote, where there is no call."""
        if not self.calls:
            return {"role": "assistant", "content": whole}
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in self.calls
        ]
        return {"role": "assistant", "content": self.text, "tool_calls": calls}

    def answers(self, results: Sequence[str]) -> "tuple[Message, ...]":
        """Messages for the policy: the result of each call, then what it is told of malformed calls."""
        returned = [
            {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result}
            for call, result in zip(self.calls, results, strict=True)
        ]
        told = [
            {"role": "tool", "name": "error", "tool_call_id": _identity(len(returned) + index), "content": text}
            for index, text in enumerate(self.malformed)
        ]
        return (*returned, *told)


def parse(text: str, style: ToolStyle, tools: Tools = ()) -> ToolTurn:
    """The calls in a turn of the policy.

    With `tools`, arguments that a style writes without types get those of the schemas, and a call that names an unknown
    tool or argument, or leaves out a required one, is malformed.
    """
    form, schemas = _STYLES[style], {tool["function"]["name"]: tool["function"] for tool in map(_wrapped, tools)}
    bodies, words = form.split(without_thought(text))
    calls: list[ToolCall] = []
    malformed: list[str] = []
    for body in bodies:
        try:
            found = form.read(body, schemas)
        except (ValueError, RecursionError) as error:
            malformed.append(f"This call could not be read: {error}. Write a call as {form.example}")
            continue
        for name, arguments, identity in found:
            try:
                _check(name, arguments, schemas)
                calls.append(ToolCall(name=name, arguments=arguments, id=identity or _identity(len(calls))))
            except ValueError as error:
                malformed.append(f"This call was not made: {error}.")
    return ToolTurn(calls=tuple(calls), malformed=tuple(malformed), text=words.strip())


def without_thought(text: str) -> str:
    """What follows the last `</think>`; nothing if a thought was begun and not ended, all if there is none."""
    _, ended, answer = text.rpartition("</think>")
    return answer if ended else "" if text.lstrip().startswith("<think>") else text


def style_of(template: str | None) -> ToolStyle:
    """The style in which a chat template writes calls; Hermes's for one that writes none."""
    for style, form in _STYLES.items():
        if template is not None and any(sign in template for sign in form.signs):
            return style
    return "hermes"


def marks_of(style: ToolStyle) -> tuple[str, ...]:
    """Special tokens that belong to the text of a call."""
    return _STYLES[style].marks


def tools_as_text(tools: Tools, style: ToolStyle) -> str:
    """What a policy is told of its tools where the chat template does not write them."""
    listed = "\n".join(json.dumps(_wrapped(tool)["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can call tools. Each is a function, given by its JSON schema:\n{listed}\n"
        f"Write a call as {_STYLES[style].example}\nYou can make several calls, one after the other."
    )


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a function or method with typed arguments that its docstring describes, in Google's form.

    Raises ConfigError for another.
    """
    from transformers.utils.chat_template_utils import get_json_schema  # takes a second

    try:
        schema = get_json_schema(function)
    except Exception as error:  # transformers has several own kinds, one of them a bare Exception
        place = inspect.getsourcefile(function) if inspect.isroutine(function) else None
        raise ConfigError(
            f"tool '{getattr(function, '__name__', function)}'{f' in {place}' if place else ''} cannot be described to "
            f"the policy: {error}. Annotate every argument, and describe it in the docstring: a sentence, then 'Args:' "
            "with a line 'name: what it is' for each"
        ) from error
    return _wrapped(schema)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Style:
    """How one family writes calls."""

    signs: tuple[str, ...]
    """Words of a chat template that show the style."""
    marks: tuple[str, ...] = ()
    split: Callable[[str], tuple[list[str], str]]
    """A text -> the bodies of its calls, and the words around them."""
    read: Callable[[str, Mapping[str, Any]], list["_Read"]]
    """A body -> its calls. Raises ValueError."""
    example: str


_Read = tuple[str, dict[str, Any], str | None]
"""Name, arguments and id of a call."""


def _identity(index: int) -> str:
    return f"call{index:05d}"


def _wrapped(tool: Mapping[str, Any]) -> dict[str, Any]:
    return dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}


def _check(name: str, arguments: Mapping[str, Any], schemas: Mapping[str, Any]) -> None:
    try:
        json.dumps([name, arguments], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair, which is no character") from None
    if not schemas:
        return
    if name not in schemas:
        raise ValueError(f"there is no tool '{name}', only {', '.join(schemas)}")
    parameters = schemas[name].get("parameters") or {}
    known, required = parameters.get("properties") or {}, parameters.get("required") or ()
    if missing := [each for each in required if each not in arguments]:
        raise ValueError(f"'{name}' needs the argument {', '.join(missing)}")
    takes_others = parameters.get("additionalProperties", not known)
    if not takes_others and (unknown := [each for each in arguments if each not in known]):
        raise ValueError(f"'{name}' has no argument {', '.join(unknown)}; it has {', '.join(known) or 'none'}")


def _tagged(pattern: re.Pattern[str], text: str) -> tuple[list[str], str]:
    return [next(filter(None, match.groups()), "") for match in pattern.finditer(text)], pattern.sub("", text)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None


def _of_object(call: Any) -> _Read:
    """A call that is an object with the name and the arguments."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("it must be a JSON object with a 'name'")
    given = call.get("arguments", call.get("parameters", {}))
    arguments = _json(given) if isinstance(given, str) else given
    if not isinstance(arguments, dict):
        raise ValueError("its arguments must be a JSON object")
    identity = call.get("id")
    return call["name"], arguments, identity if isinstance(identity, str) and identity else None


def _read_json(body: str, _: Mapping[str, Any]) -> list[_Read]:
    return [_of_object(_json(body))]


def _typed(value: str, name: str, argument: str, schemas: Mapping[str, Any]) -> Any:
    """An argument that was written as bare text: text where the schema says so, JSON where it is."""
    properties = (schemas.get(name, {}).get("parameters") or {}).get("properties") or {}
    if (properties.get(argument) or {}).get("type") == "string":
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _read_tags(
    body: str, schemas: Mapping[str, Any], *, head: re.Pattern[str], argument: re.Pattern[str], end: str
) -> list[_Read]:
    """A call whose name and arguments stand in tags."""
    begun = head.match(body)
    if begun is None:
        raise ValueError("it must begin with the name of the tool")
    name, rest = begun[1].strip(), body[begun.end() :]
    if left := argument.sub("", rest).replace(end, "").strip():
        raise ValueError(f"its arguments are not all in tags: {left[:40]!r}")
    return [
        (name, {key.strip(): _typed(value, name, key.strip(), schemas) for key, value in argument.findall(rest)}, None)
    ]


_BARE_CALL = re.compile(r'\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:')


def _split_llama(text: str) -> tuple[list[str], str]:
    """The reply is JSON of calls, with semicolons between, after `<|python_tag|>` or from its beginning; or words."""
    words, mark, calls = text.partition("<|python_tag|>")
    if not mark:
        words, calls = ("", text.strip()) if _BARE_CALL.match(text.strip()) else (text, "")
    bodies: list[str] = []
    while calls := calls.lstrip(" \n;"):
        try:
            end = json.JSONDecoder().raw_decode(calls)[1]
        except (ValueError, RecursionError):
            end = len(calls)
        bodies.append(calls[:end])
        calls = calls[end:]
    return bodies, words


def _split_mistral(text: str) -> tuple[list[str], str]:
    words, *bodies = text.split("[TOOL_CALLS]")
    return bodies, words


_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+))?\s*(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)


def _read_mistral(body: str, _: Mapping[str, Any]) -> list[_Read]:
    """A list of calls, or in newer models the name and then the arguments of one."""
    if named := _NAMED.fullmatch(body):
        name, identity, arguments = named.groups()
        return [_of_object({"name": name, "arguments": _json(arguments), "id": identity})]
    calls = _json(body)
    return [_of_object(call) for call in (calls if isinstance(calls, list) else [calls])]


_IN_TAGS = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FUNCTION = re.compile(
    r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)|(<function=.*?(?:</function>|\Z))", re.DOTALL
)
# A value holds no beginning of another, so that a search takes linear time.
_GLM_ARGUMENT = re.compile(
    r"<arg_key>([^<]*)</arg_key>\s*<arg_value>((?:(?!<arg_value>|</arg_value>).)*)</arg_value>", re.DOTALL
)
_QWEN_ARGUMENT = re.compile(r"<parameter=([^<>\n]+)>\n?((?:(?!<parameter=|</parameter>).)*?)\n?</parameter>", re.DOTALL)

_STYLES: dict[ToolStyle, _Style] = {
    "mistral": _Style(
        signs=("[TOOL_CALLS]",),
        marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        split=_split_mistral,
        read=_read_mistral,
        example='[TOOL_CALLS] [{"name": "tool", "arguments": {"argument": "value"}}]',
    ),
    "llama": _Style(
        signs=("<|python_tag|>", "ipython"),
        marks=("<|python_tag|>",),
        split=_split_llama,
        read=_read_json,
        example='{"name": "tool", "parameters": {"argument": "value"}}',
    ),
    "glm": _Style(
        signs=("<arg_key>",),
        marks=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        split=partial(_tagged, _IN_TAGS),
        read=partial(
            _read_tags,
            head=re.compile(r"\s*([^\s<]+)\s*"),
            argument=_GLM_ARGUMENT,
            end="",
        ),
        example="<tool_call>tool\n<arg_key>argument</arg_key>\n<arg_value>value</arg_value>\n</tool_call>",
    ),
    "qwen_coder": _Style(
        signs=("<function=",),
        marks=("<tool_call>", "</tool_call>"),
        split=partial(_tagged, _FUNCTION),
        read=partial(
            _read_tags,
            head=re.compile(r"\s*<function=([^<>\n]+)>"),
            argument=_QWEN_ARGUMENT,
            end="</function>",
        ),
        example="<tool_call>\n<function=tool>\n<parameter=argument>\nvalue\n</parameter>\n</function>\n</tool_call>",
    ),
    "hermes": _Style(
        signs=("<tool_call>",),
        marks=("<tool_call>", "</tool_call>"),
        split=partial(_tagged, _IN_TAGS),
        read=_read_json,
        example='<tool_call>\n{"name": "tool", "arguments": {"argument": "value"}}\n</tool_call>',
    ),
}
"""In the order in which a template's words are looked for."""
