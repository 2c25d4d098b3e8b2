"""Calls of tools in the styles of families; what is malformed is told to the policy."""

from contextlib import closing
from typing import Any, get_args

import pytest
from transformers import Qwen2Tokenizer

from chat_families import FAMILIES, Family
from example_environments import Counter
from proximo.config.environment import ToolsEnvironmentConfig
from proximo.data.tokenizer_training import train_tokenizer
from proximo.environments.tool_calls import (
    ToolCall,
    ToolStyle,
    marks_of,
    parse,
    style_of,
    tool_schema,
    tools_as_text,
    without_thought,
)
from proximo.environments.turn_renderer import TurnRenderer
from proximo.errors import ConfigError
from proximo.run.make.environments import PythonEnvironment, make_environments
from real_data import real_data
from tool_templates import TOOL_FAMILIES
from turn_templates import TURN_FAMILIES

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]}}
TOOLS = [{"type": "function", "function": WEATHER}]
CODER = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '<tool_call>\n<function=' + c.function.name + '>\n' }}"
    "{% for name, value in c.function.arguments.items() %}{{ '<parameter=' + name + '>\n' }}"
    "{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GLM_CALLS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '\n<tool_call>' + c.function.name + '\n' }}{% for name, value in c.function.arguments.items() %}"
    "{{ '<arg_key>' + name + '</arg_key>\n<arg_value>' }}{{ value if value is string else value | tojson }}"
    "{{ '</arg_value>\n' }}{% endfor %}{{ '</tool_call>' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CALLING_FAMILIES: dict[str, tuple[ToolStyle, Family | None]] = {
    "qwen 2.5": ("hermes", None),
    "llama 3.1": ("llama", TOOL_FAMILIES["llama 3.1"]),
    "mistral": ("mistral", TURN_FAMILIES["mistral"]),
    "qwen coder": ("qwen_coder", Family(template=CODER, marks=("<|im_start|>",), eos="<|im_end|>")),
    "glm": ("glm", Family(template=GLM_CALLS, eos="<|endoftext|>")),
}


@pytest.mark.parametrize("name", CALLING_FAMILIES)
def test_what_a_template_writes_of_calls_is_read_as_these_calls(name: str) -> None:
    style, family = CALLING_FAMILIES[name]
    tokenizer: Any
    if family is None:
        tokenizer = Qwen2Tokenizer.from_pretrained(real_data("tokenizers", "qwen2.5"))
    else:
        tokenizer = family.tokenizer()
    assert style_of(tokenizer.chat_template) == style
    arguments = [{"city": 'Ulm "12"\n</b>', "days": 3}, {"city": "12", "where": {"a": [1, None, "é"]}}]
    for chosen in (arguments[:1], arguments if style != "llama" else arguments[1:]):
        calls = [{"type": "function", "function": {"name": "weather", "arguments": each}} for each in chosen]
        asked = [{"role": "user", "content": "Go."}]
        messages = [*asked, {"role": "assistant", "content": "", "tool_calls": calls}]
        before = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        said = tokenizer.apply_chat_template(messages, tokenize=False).removeprefix(before)
        said = said.rstrip("\n").removesuffix("<|eot_id|>").removesuffix(tokenizer.eos_token)
        turn = parse(said, style, TOOLS)
        assert (turn.malformed, turn.text) == ((), "")
        assert [(call.name, call.arguments) for call in turn.calls] == [("weather", each) for each in chosen]


def test_a_template_whose_calls_are_not_read_is_refused() -> None:
    tokenizers: list[Any] = [family.tokenizer() for _, family in CALLING_FAMILIES.values() if family is not None]
    for tokenizer in (*tokenizers, FAMILIES["gemma"].tokenizer(), train_tokenizer([""], vocab_size=257)):
        TurnRenderer(tokenizer).check_tools()
    foreign = TOOL_FAMILIES["deepseek 3"].tokenizer()
    with pytest.raises(ConfigError, match=r"writes calls of tools in a style that is not known: .*set tool_style"):
        TurnRenderer(foreign).check_tools()
    TurnRenderer(foreign, tool_style="hermes").check_tools()
    with pytest.raises(ConfigError, match="writes calls of tools"):
        PythonEnvironment(make=Counter, tools=True).arena(foreign)
    with closing(PythonEnvironment(make=Counter, tools=True, tool_style="glm").arena(foreign)) as arena:
        assert arena.renderer.tool_style == "glm"
    given = {"kind": "tools", "path": "example_environments:Counter", "workers": 1}
    with pytest.raises(ConfigError, match="writes calls of tools"):
        make_environments(ToolsEnvironmentConfig.model_validate(given), foreign, on_every_rank=True)
    own = ToolsEnvironmentConfig.model_validate(given | {"tool_style": "glm"})
    with closing(make_environments(own, foreign, on_every_rank=True)) as arena:
        assert arena.renderer.tool_style == "glm"


def test_the_style_of_a_template_without_calls_is_that_of_hermes() -> None:
    assert style_of(None) == style_of(FAMILIES["gemma"].template) == "hermes"


CALL = {
    "hermes": '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>',
    "qwen_coder": "<tool_call><function=weather><parameter=city>Ulm</parameter></function></tool_call>",
    "llama": '<|python_tag|>{"name": "weather", "parameters": {"city": "Ulm"}}',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Ulm"}}]',
    "glm": "<tool_call>weather<arg_key>city</arg_key><arg_value>Ulm</arg_value></tool_call>",
}
READ = ToolCall(name="weather", arguments={"city": "Ulm"}, id="call00000")
STYLES = get_args(ToolStyle)


@pytest.mark.parametrize("style", STYLES)
def test_words_and_calls_are_apart_and_thoughts_call_nothing(style: ToolStyle) -> None:
    turn = parse(f"<think>{CALL[style]}</think>\n\nI look. {CALL[style]}", style, TOOLS)
    assert (turn.calls, turn.malformed, turn.text) == ((READ,), (), "I look.")
    assert parse(f"<think>{CALL[style]}", style).calls == ()
    assert parse("No call.", style).text == "No call."
    assert all(mark in CALL[style] or mark in ("[ARGS]", "[CALL_ID]") for mark in marks_of(style) if "arg" not in mark)


@pytest.mark.parametrize("style", STYLES)
def test_a_call_that_was_cut_is_malformed_and_one_without_its_closing_tag_is_not(style: ToolStyle) -> None:
    for length in range(len(CALL[style].partition("weather")[0]), len(CALL[style])):
        cut = CALL[style][:length]
        turn = parse(cut, style, TOOLS)
        assert len(turn.malformed) + len(turn.calls) == 1, cut
        assert turn.calls in ((), (READ,)), cut
    assert parse(CALL[style].removesuffix("</tool_call>"), style, TOOLS).calls == (READ,)


@pytest.mark.parametrize(
    ("style", "text", "told"),
    [
        ("hermes", "<tool_call>{name: 1}</tool_call>", "it is not JSON (Expecting property name"),
        ("hermes", "<tool_call></tool_call>", "it is not JSON"),
        ("hermes", '<tool_call>["weather"]</tool_call>', "it must be a JSON object with a 'name'"),
        ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>', "arguments must be a JSON object"),
        ("hermes", '<tool_call>{"name": "rain", "arguments": {}}</tool_call>', "no tool 'rain', only weather"),
        ("hermes", '<tool_call>{"name": "weather"}</tool_call>', "'weather' needs the argument city"),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"city": "a", "b": 1}}</tool_call>',
            "'weather' has no argument b; it has city, days, where",
        ),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call>',
            "not made: it holds",
        ),
        ("hermes", "<tool_call>" + "[" * 10**5, "could not be read"),
        ("llama", "<|python_tag|>print(1)", "it is not JSON"),
        ("llama", '{"name": "weather", "parameters": {"city": ', "it is not JSON"),
        ("mistral", "[TOOL_CALLS]weather(city='Ulm')", "it is not JSON"),
        ("qwen_coder", "<tool_call>weather</tool_call>", "it must begin with the name"),
        ("qwen_coder", "<tool_call><function=weather>Ulm</function></tool_call>", "not all in tags: 'Ulm'"),
        ("glm", "<tool_call>weather\nUlm</tool_call>", "not all in tags: 'Ulm'"),
    ],
)
def test_a_malformed_call_is_answered_with_its_reason(style: ToolStyle, text: str, told: str) -> None:
    turn = parse(text, style, TOOLS)
    assert turn.calls == ()
    (answer,) = turn.malformed
    assert told in answer


def test_the_other_calls_of_a_turn_are_made() -> None:
    text = f"{CALL['hermes']}<tool_call>oops</tool_call>{CALL['hermes']}"
    turn = parse(text, "hermes", TOOLS)
    assert ([call.id for call in turn.calls], len(turn.malformed)) == (["call00000", "call00001"], 1)
    answers = turn.answers(["wet", "dry"])
    assert [(each["tool_call_id"], each["content"]) for each in answers[:2]] == [
        ("call00000", "wet"),
        ("call00001", "dry"),
    ]
    assert (answers[2]["role"], answers[2]["tool_call_id"]) == ("tool", "call00002")
    assert answers[2]["content"] == turn.malformed[0]
    two = parse(
        '[TOOL_CALLS] [{"name": "x"}, {"name": "weather", "arguments": {"city": "a"}, "id": "abc123def"}]',
        "mistral",
        TOOLS,
    )
    assert ([call.id for call in two.calls], len(two.malformed)) == (["abc123def"], 1)


def test_other_forms_of_families() -> None:
    newer = '[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{"city": "Ulm"}[TOOL_CALLS]weather{"city": "Bonn"}'
    assert [(call.id, call.arguments["city"]) for call in parse(newer, "mistral", TOOLS).calls] == [
        ("abc123def", "Ulm"),
        ("call00001", "Bonn"),
    ]
    several = '{"name": "weather", "parameters": {"city": "a"}}; {"name": "weather", "parameters": {"city": "b"}}'
    assert [call.arguments["city"] for call in parse(several, "llama", TOOLS).calls] == ["a", "b"]
    assert parse('{"answer": 3}', "llama", TOOLS).text == '{"answer": 3}'
    bare = "<function=weather>\n<parameter=city>\nUlm\n</parameter>\n</function>"
    assert parse(bare, "qwen_coder", TOOLS).calls == (READ,)
    as_text = '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Ulm\\"}"}</tool_call>'
    assert parse(as_text, "hermes", TOOLS).calls == (READ,)


def test_arguments_in_tags_get_the_types_of_their_schema() -> None:
    arguments = [f"<arg_key>{name}</arg_key><arg_value>12</arg_value>" for name in ("city", "days")]
    text = f"<tool_call>weather{''.join(arguments)}"
    assert parse(text, "glm", TOOLS).calls[0].arguments == {"city": "12", "days": 12}
    assert parse(text, "glm").calls[0].arguments == {"city": 12, "days": 12}


@pytest.mark.parametrize("style", STYLES)
def test_hostile_turns_take_linear_time(style: ToolStyle) -> None:
    """A search that tries every beginning against every end would take hours. None of it calls a tool that there is."""
    for piece in ("<arg_key>a", "<arg_key>a</arg_key><arg_value>", "<parameter=a>", "<parameter=", "<function=", "{};"):
        for begin in ("<tool_call>a", "<tool_call><function=a>", "<|python_tag|>", "[TOOL_CALLS]a"):
            assert parse(begin + piece * 20000, style, TOOLS).calls == ()
    for text in ("<tool_call>", "[TOOL_CALLS]", '{"name":', "</think>", "<think>"):
        assert parse(text * 20000, style, TOOLS).calls == ()


def test_without_thought() -> None:
    assert without_thought("a</think>b</think>\n\nc") == "\n\nc"
    assert without_thought(" <think>a") == ""
    assert without_thought("a <think>") == "a <think>"


def test_tools_as_text_say_how_to_call() -> None:
    for style in STYLES:
        text = tools_as_text([WEATHER], style)
        assert '{"name": "weather"' in text
        example = text.partition("Write a call as ")[2].partition("\nYou can make")[0]
        assert [call.name for call in parse(example, style).calls] == ["tool"]


def test_a_schema_comes_from_types_and_docstring() -> None:
    class Desk:
        def add(self, a: int, b: int = 0) -> int:
            """Adds.

            Args:
                a: One number.
                b: Another.
            """
            return a + b

        def bare(self, a):
            return a

    schema = tool_schema(Desk().add)
    assert schema["function"]["parameters"]["required"] == ["a"]
    assert parse('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "hermes", [schema]).malformed == ()
    with pytest.raises(ConfigError, match=r"tool 'bare' in .*cannot be described to the policy: .*Annotate every"):
        tool_schema(Desk().bare)
