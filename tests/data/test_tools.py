"""Tools are written by the chat template, calls are learned, what tools return is context. No form is lost in silence.

The oracle is `apply_chat_template` of transformers.
"""

import json
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from builders import tiny_tokenizer
from chat_families import CHATML, FAMILIES
from proximo.data.examples import ExampleOptions, load_text_examples
from proximo.data.formats.column_use import read_by_source
from proximo.data.formats.context_columns import in_context
from proximo.data.formats.messages import messages_cell, tools_cell
from proximo.data.formats.prompt_response import Exchange
from proximo.data.labelled import LabelledOptions, load_labelled_responses
from proximo.data.preferences import PairOptions, load_preference_pairs
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.readers.reading import read_source
from proximo.data.readers.source import DataSource
from proximo.data.rendering import render_for
from proximo.data.rows import Row
from proximo.data.step_examples import StepOptions, load_step_examples
from proximo.data.tokenise import TextEncoder
from proximo.errors import DataError
from proximo.rewards.protocol import read_request, request_body
from records_made import response
from tool_templates import TOOL_FAMILIES

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": PARAMETERS}}
ASK = {"role": "user", "content": "Rain in Ulm?"}
CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "a1b2c3d4e", "content": "wet"}
ANSWER = {"role": "assistant", "content": "Yes."}
TALK = [ASK, CALLS, RESULT, ANSWER]


@pytest.fixture(params=["qwen 2.5", *TOOL_FAMILIES])
def family(request: pytest.FixtureRequest) -> Any:
    """A tokenizer, and how its template takes a call."""
    if request.param == "qwen 2.5":
        return request.getfixturevalue("real_tokenizers")["qwen2.5"]
    return TOOL_FAMILIES[request.param].tokenizer()


def rows(*values: dict[str, Any]) -> list[Row]:
    return [Row(source="made", number=number, values=value) for number, value in enumerate(values, 1)]


def rendered(tokenizer: Any, messages: list[dict], *, tools: Any = (WEATHER,), is_open: bool = False) -> str:
    """By transformers, in the form that the template takes."""
    if "calls|>" in tokenizer.chat_template:
        text = json.dumps(CALL["function"]["arguments"])
        call = {**CALL, "function": {**CALL["function"], "arguments": text}}
        messages = [{**m, "content": None, "tool_calls": [call]} if "tool_calls" in m else m for m in messages]
    given = list(tools) if tools else None
    if "content is none" in tokenizer.chat_template:  # the method would leave the null out
        options = {"add_generation_prompt": is_open, **tokenizer.special_tokens_map}
        return render_jinja_template([messages], tools=given, chat_template=tokenizer.chat_template, **options)[0][0]
    return tokenizer.apply_chat_template(messages, tools=given, tokenize=False, add_generation_prompt=is_open)


def learned(tokenizer: Any, row: dict[str, Any], **options: Any) -> tuple[str, str]:
    """(the whole text, the texts that count)."""
    example = load_text_examples(rows(row), tokenizer, ExampleOptions(**options))[0][0]
    counted = [token for token, counts in zip(example.token_ids, example.loss_mask, strict=True) if counts]
    return tokenizer.decode(list(example.token_ids)), tokenizer.decode(counted)


def turn(tokenizer: Any, before: list[dict], message: dict) -> str:
    """What a turn adds, up to the end that the policy writes."""
    asked = rendered(tokenizer, before, is_open=True)
    return rendered(tokenizer, [*before, message]).removeprefix(asked).rstrip("\n")


def test_a_conversation_with_tools_is_that_of_the_template_and_what_the_assistant_wrote_is_learned(family) -> None:
    whole, counted = learned(family, {"messages": TALK, "tools": [WEATHER]})
    assert whole == rendered(family, TALK).rstrip("\n")
    assert counted == turn(family, [ASK], CALLS) + turn(family, [ASK, CALLS, RESULT], ANSWER)
    assert "weather" in counted
    assert "wet" in whole.removesuffix(counted)
    assert "wet" not in counted


def test_a_prompt_has_its_tools_and_a_reward_model_reads_them(family) -> None:
    """The scorer gets the prompt again, over the wire too, and writes it with its own template."""
    (prompt,), _ = load_prompts(rows({"messages": TALK, "tools": [WEATHER]}), family, PromptOptions())
    assert family.decode(list(prompt.token_ids)) == rendered(family, TALK[:-1], is_open=True)
    assert prompt.metadata == {"tools": [WEATHER]}
    (pair,), _ = load_preference_pairs(
        rows({"prompt": TALK[:-1], "chosen": "Yes.", "rejected": "No.", "tools": [WEATHER]}), family, PairOptions()
    )
    sent = response(to=prompt)
    received = read_request(request_body([sent]))[0].prompt
    for asked in (prompt, received):
        assert render_for(TextEncoder(family), asked, "Yes.") == (pair.prompt_token_ids, pair.chosen_token_ids)


def test_pairs_and_labelled_answers_count_what_the_assistant_wrote(family) -> None:
    row = {"prompt": [ASK], "chosen": TALK[1:], "rejected": [ANSWER], "tools": [WEATHER]}
    (pair,), _ = load_preference_pairs(rows(row), family, PairOptions(learned="responses"))
    labelled = {"prompt": [ASK], "completion": TALK[1:], "tools": [WEATHER], "label": True}
    (response,), _ = load_labelled_responses(rows(labelled), family, LabelledOptions(max_tokens=9999))
    assert pair.rejected_mask is None
    assert (response.response_token_ids, response.response_mask) == (pair.chosen_token_ids, pair.chosen_mask)
    assert pair.chosen_mask is not None
    counted = [token for token, counts in zip(pair.chosen_token_ids, pair.chosen_mask, strict=True) if counts]
    assert family.decode(counted) == turn(family, [ASK], CALLS) + turn(family, [ASK, CALLS, RESULT], ANSWER)
    whole = family.decode([*pair.prompt_token_ids, *pair.chosen_token_ids])
    assert whole == rendered(family, TALK).rstrip("\n")


def test_a_solution_in_steps_is_read_with_the_tools_of_its_prompt(family) -> None:
    row = {"prompt": [ASK], "steps": ["Look.", "Yes."], "labels": [1, 1], "tools": [WEATHER]}
    (example,), report = load_step_examples(rows(row), family, StepOptions())
    assert family.decode(list(example.token_ids)).startswith(rendered(family, [ASK], is_open=True))
    assert not report.remarks


TEXT = json.dumps(CALL["function"]["arguments"])
FORMS_OF_A_CALL = {
    "null content": {**CALLS, "content": None},
    "no content": {"role": "assistant", "tool_calls": [CALL]},
    "arguments as text": {**CALLS, "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": TEXT}}]},
    "one call": {**CALLS, "tool_calls": CALL},
    "calls as text": {**CALLS, "tool_calls": json.dumps([CALL])},
    "added nulls": {**CALLS, "name": None, "function_call": None, "tool_call_id": None},
}
FORMS_WITHOUT_AN_ID = {
    "OpenAI's older": {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": TEXT}},
    "ShareGPT": {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": {"city": "Ulm"}})},
    "ShareGPT, a list": {"from": "function_call", "value": f'[{{"name": "weather", "arguments": {TEXT}}}]'},
    "without a type": {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": TEXT}]},
}


RESULTS = [
    {"from": "observation", "value": "wet"},
    {"from": "tool", "value": "wet"},
    {"role": "function", "content": "wet"},
    {"role": "tool", "content": [{"type": "text", "text": "wet"}]},
]
FUNCTION = WEATHER["function"]
TOOLS = [[WEATHER], WEATHER, [FUNCTION], json.dumps([WEATHER]), json.dumps(FUNCTION), [json.dumps(WEATHER)]]


def test_every_form_of_a_call_of_its_result_and_of_the_tools_is_one() -> None:
    for form, message in (FORMS_OF_A_CALL | FORMS_WITHOUT_AN_ID).items():
        call = CALL if form in FORMS_OF_A_CALL else {key: value for key, value in CALL.items() if key != "id"}
        (row,) = rows({"messages": [message]})
        assert messages_cell(row, "messages") == ({**CALLS, "tool_calls": [call]},), form
    for result in RESULTS:
        assert messages_cell(rows({"messages": [result]})[0], "messages") == ({"role": "tool", "content": "wet"},)
    for tools in TOOLS:
        assert tools_cell(rows({"tools": tools})[0]) == [WEATHER], tools


def test_no_tools_are_none(family) -> None:
    bare = rendered(family, [ASK, ANSWER], tools=None).rstrip("\n")
    for given in (None, "", " ", [], "[]", "null"):
        assert learned(family, {"messages": [ASK, ANSWER], "tools": given})[0] == bare


def test_calls_that_call_nothing_are_as_if_absent() -> None:
    for key, empty in product(("tool_calls", "function_call"), (None, [], "", {}, "[]")):
        (row,) = rows({"messages": [{**ASK, key: empty, "name": None}, {**ANSWER, key: empty}]})
        assert messages_cell(row, "messages") == (ASK, ANSWER), (key, empty)


def test_nulls_that_a_table_adds_are_in_no_schema_and_no_call(tmp_path: Path) -> None:
    """Parquet gives every object of a column the keys of all. What JSON says of null stays."""
    import pyarrow
    from pyarrow import parquet

    other = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "required": ["zone"]}}}
    call = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL, call]}
    parquet.write_table(
        pyarrow.Table.from_pylist([{"messages": [ASK, calls], "tools": [WEATHER, other]}]), tmp_path / "a.parquet"
    )
    (row,) = read_source(DataSource(path=str(tmp_path / "a.parquet")))
    assert row.values["messages"][1]["tool_calls"][1]["function"]["arguments"] == {"city": None, "zone": "UTC"}
    assert tools_cell(row) == [WEATHER, other]
    assert messages_cell(row, "messages")[1]["tool_calls"] == [CALL, call]
    given = {"name": "a", "arguments": {"b": None}}
    (line,) = rows({"messages": [{"role": "assistant", "tool_calls": [given]}]})
    assert messages_cell(line, "messages")[0]["tool_calls"][0]["function"] == given


def test_nulls_of_json_text_in_a_table_stay() -> None:
    """The text is the user's; a table adds nothing to it."""
    tool = {"name": "a", "parameters": {"properties": {"b": {"default": None}}}}
    call = {"name": "a", "arguments": {"b": None}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    values = {
        "tools": json.dumps([tool]),
        "prompt": [ASK],
        "messages": json.dumps([ASK, turn]),
        "response": [turn | {"tool_calls": json.dumps([call])}],
        "history": json.dumps([ASK, turn]),
        "chat_template_kwargs": json.dumps({"c": None}),
    }
    table = Row(source="a", number=1, values=values, from_table=True)

    def read(row: Row) -> None:
        assert tools_cell(row)[0]["function"] == tool
        assert tools_cell(replace(row, values={"tools": [json.dumps(tool)]}))[0]["function"] == tool
        for column in ("messages", "response"):
            assert messages_cell(row, column)[-1]["tool_calls"][0]["function"] == call
        exchange = in_context(row, Exchange(origin="a", prompt="Rain?"))
        assert exchange.template_variables["c"] is None
        assert exchange.before[-1]["tool_calls"][0]["function"] == call

    assert list(read_by_source([table], lambda _: read, Counter())) == [None]


MALFORMED = [
    ({"tools": [5]}, "tool 1 of column 'tools' must be a function"),
    ({"tools": [{"function": {}}]}, "tool 1 of column 'tools' must be a function"),
    ({"tools": "weather"}, "column 'tools' is text, but not JSON"),
    ({"tools": 5}, "column 'tools' must be a list"),
    ({"messages": [ASK, {**CALLS, "tool_calls": [{"id": "x"}]}]}, "a call in 'messages', message 2 must have the name"),
    (
        {"messages": [ASK, {**CALLS, "tool_calls": [{"name": "a", "parameters": {}}]}]},
        "there are no arguments of 'a' in 'messages', message 2",
    ),
    (
        {"messages": [ASK, {**CALLS, "tool_calls": [{"name": "a", "arguments": "{b: 1}"}]}]},
        "arguments of 'a' in 'messages', message 2 is text, but not JSON",
    ),
    (
        {"messages": [ASK, {**CALLS, "tool_calls": [{"name": "a", "arguments": "[1]"}]}]},
        "must be an object, got a list of 1",
    ),
    ({"messages": [{**ASK, "tool_calls": [CALL]}, ANSWER]}, "message 1 calls a tool, but is a turn of user"),
    ({"messages": [ASK, {"from": "function_call", "value": "weather()"}]}, "is text, but not JSON"),
]


@pytest.mark.parametrize(("values", "told"), MALFORMED)
def test_what_is_no_tool_and_no_call_is_refused_with_its_row(values: dict, told: str) -> None:
    with pytest.raises(DataError) as caught:
        load_text_examples(rows({"messages": TALK} | values), TOOL_FAMILIES["llama 3.1"].tokenizer(), ExampleOptions())
    assert str(caught.value).startswith("made, row 1: ")
    assert told in str(caught.value)


def test_a_template_that_leaves_out_tools_is_refused() -> None:
    tokenizer = FAMILIES["chatml"].tokenizer()
    of_message = "{% if 'tools' in m and m['tools'] is not none %}{{ m['tools'] | tojson }}{% endif %}"  # Phi-4-mini
    for template in (CHATML, "{# no tools #}" + CHATML, CHATML.replace("messages %}", f"messages %}}{of_message}", 1)):
        tokenizer.chat_template = template
        with pytest.raises(DataError, match=r"made, row 1: .* of 'family' does not write tools.*tools: ''"):
            learned(tokenizer, {"messages": [ASK, ANSWER], "tools": [WEATHER]})
    with_system = "{% if messages[0].role == 'system' %}{{ tools | tojson }}{% endif %}"
    tokenizer.chat_template = with_system + CHATML
    system = {"role": "system", "content": "a"}
    assert "weather" in learned(tokenizer, {"messages": [system, ASK, ANSWER], "tools": [WEATHER]})[0]
    with pytest.raises(DataError, match=r"made, row 1: .*'family' refuses the messages .*it leaves out calls of tools"):
        learned(tokenizer, {"messages": TALK})
    silent = replace(FAMILIES["chatml"], template=CHATML.replace("messages %}", "messages if m.role != 'tool' %}", 1))
    with pytest.raises(DataError, match=r"made, row 1: .* it leaves out what tools return"):
        learned(silent.tokenizer(), {"messages": [ASK, ANSWER, {"role": "tool", "content": "wet"}, ANSWER]})


def test_calls_in_text_need_no_template_that_knows_calls() -> None:
    """In Hermes' data the assistant writes its calls itself."""
    said = {"role": "assistant", "content": '<tool_call>{"name": "weather"}</tool_call>'}
    whole, counted = learned(FAMILIES["chatml"].tokenizer(), {"messages": [ASK, said, RESULT, ANSWER]})
    assert "<|im_start|>tool\nwet<|im_end|>" in whole
    assert counted == f"{said['content']}<|im_end|>Yes.<|im_end|>"


def test_several_templates_of_a_tokenizer_have_one_for_tools() -> None:
    tokenizer = TOOL_FAMILIES["llama 3.1"].tokenizer()
    tokenizer.chat_template = {"default": CHATML, "tool_use": tokenizer.chat_template}
    assert "ipython" in learned(tokenizer, {"messages": TALK, "tools": [WEATHER]})[0]


def test_tools_beside_a_prompt_of_text_are_refused_or_it_becomes_a_message() -> None:
    row = {"prompt": "Rain in Ulm?", "response": "Yes.", "tools": [WEATHER]}
    with pytest.raises(DataError, match=r"made, row 1: column 'tools' is for a chat template.*as_messages.*tools: ''"):
        learned(tiny_tokenizer(), row)
    tokenizer = TOOL_FAMILIES["llama 3.1"].tokenizer()
    assert learned(tokenizer, row, as_messages=True)[0] == rendered(tokenizer, [ASK, ANSWER])
