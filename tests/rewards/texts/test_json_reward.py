"""Rewards for JSON: what is read, what is refused before a value is made, and what a schema may refer to."""

import json
import socket
import time
from typing import Any

import pytest

from proximo.errors import ConfigError
from proximo.rewards import json_schema
from proximo.rewards.json_schema import MAX_INTEGER_DIGITS, BadJSONError, JSONSchemaVerifier, nesting, read_json
from proximo_verifiers.verifier import Answer, Grade, ScoreState

CITY: dict[str, Any] = {
    "type": "object",
    "required": ["name", "people"],
    "properties": {"name": {"type": "string"}, "people": {"type": "integer", "minimum": 0}},
    "additionalProperties": False,
}
PARIS = '{"name": "Paris", "people": 2100000}'


def grade(text: str, schema: Any = CITY) -> Grade:
    return JSONSchemaVerifier(json_schema=schema).grade(Answer(text=text, prompt="?"))


def test_the_last_fenced_block_is_read() -> None:
    wrong = "```json\n{}\n```"
    right = f"```json\n{PARIS}\n```"
    assert grade(f"Here:\n{wrong}\nor rather\n{right}\nYes.").score == 1
    assert grade(f"Here:\n{right}\nor rather\n{wrong}").score == 0
    assert grade(f"```\n{PARIS}\n```").score == 1
    assert grade(f"```json\r\n{PARIS}\r\n```".replace("\r\n", "\n")).score == 1


@pytest.mark.parametrize("text", [f"Here: {PARIS}", f"```json\n{PARIS}", f"``` {PARIS} ```", ""])
def test_without_a_whole_fenced_block_the_response_is_read_as_it_is(text: str) -> None:
    assert grade(f" {PARIS}\n").score == 1
    found = grade(text)
    assert (found.score, found.state) == (0, ScoreState.MODEL_FAULT)
    assert found.reason == "no JSON: Expecting value at character 1"
    assert found.components == {"parsed": 0.0}


def test_what_breaks_the_schema_was_read_and_says_where() -> None:
    found = grade('{"name": "Paris", "people": -1}')
    assert (found.score, found.reason) == (0, "$.people fails 'minimum'")
    assert found.components == {"parsed": 1.0}
    assert grade('{"name": "Paris", "people": true}').score == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1, "a": 1}', "an object has a key twice"),
        ('[{"b": {"a": 1, "a": 2}}]', "an object has a key twice"),
        ("NaN", "NaN is not JSON"),
        ("[-Infinity]", "-Infinity is not JSON"),
        ("1e999", "a number beyond all floats"),
        ("[[[[1]]]]", "JSON nested more than 3 deep"),
        ("[" * 900, "JSON nested more than 3 deep"),
        ('[{"a":' * 100, "JSON nested more than 3 deep"),
        ("9" * (MAX_INTEGER_DIGITS + 1), f"an integer of more than {MAX_INTEGER_DIGITS} digits"),
        ('"' + "é" * 500 + '"', "1002 bytes of JSON, more than 1000"),
        ("{'a': 1}", "no JSON: Expecting property name enclosed in double quotes at character 2"),
        ("1 2", "no JSON: Extra data at character 3"),
        ('"\x01"', "no JSON: Invalid control character at at character 2"),
    ],
)
def test_what_is_refused(text: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_schema, "MAX_BYTES", 1000)
    monkeypatch.setattr(json_schema, "MAX_NESTING", 3)
    with pytest.raises(BadJSONError) as caught:
        read_json(text)
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    "value", [[[[1]]], {"a": [{}]}, '[[[[ "', "\\", '\\"[[[[', "\ud800", 10**299, -(10**299), 1.5e308, "", None]
)
def test_what_is_within_the_bounds_is_read_as_python_reads_it(value: Any) -> None:
    assert read_json(json.dumps(value)) == value


def test_brackets_in_strings_are_no_nesting() -> None:
    assert nesting('["[[[", "\\"[[[", {"]": "\\\\"}]') == 2
    assert nesting('["[[[[') == 1


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "multipleOf": 0.01},
        {"type": "integer", "multipleOf": 3},
        {"type": "number", "maximum": 1e308},
        {"enum": [1.0, 2.0]},
        {"uniqueItems": True},
    ],
)
def test_no_number_of_an_answer_makes_the_verifier_fail(schema: Any) -> None:
    for text in ("9" * MAX_INTEGER_DIGITS, "1.7e308", "1e-320", "[1, 1.0, true]", '"\\ud800"'):
        assert grade(text, schema).state is not ScoreState.INFRASTRUCTURE_FAULT, text


def test_a_schema_may_refer_to_its_own_parts_and_to_itself() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#/$defs/leaf"}}}
    schema = {**tree, "$defs": {"leaf": {"type": "integer"}}}
    assert grade('{"left": {"left": {}, "right": 3}}', schema).score == 1
    assert grade('{"left": {"left": 1}}', schema).score == 0


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "objct"}, "not a JSON schema"),
        ({"items": {"$ref": "http://127.0.0.1:9/x.json"}}, "nothing is fetched"),
        ({"$ref": "file:///etc/hostname"}, "nothing is fetched"),
        ({"anyOf": [{"$dynamicRef": "other#x"}]}, "nothing is fetched"),
        ({"$ref": "#/$defs/none"}, "which is not a part of it"),
        ({"$ref": "#"}, "refers to itself without end"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, "refers to itself without end"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_and_nothing_is_fetched(
    schema: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("something was fetched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(ConfigError, match=problem):
        JSONSchemaVerifier(json_schema=schema)


def test_an_older_draft_is_read_as_it_was_meant() -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "string"}]}
    assert grade('["a", 1]', schema).score == 1
    assert grade("[1]", schema).score == 0


@pytest.mark.parametrize(
    ("items", "unique"),
    [
        ('[1, 2, "1", true, null, "null"]', True),
        ("[1, 1.0]", False),
        ("[1e2, 100]", False),
        ("[0, -0.0]", False),
        ("[0, false]", True),
        ("[1.5, 1.25]", True),
        ("[9007199254740993, 9007199254740992.0]", True),
        ('[{"a": 1, "b": [2.0]}, {"b": [2], "a": 1}]', False),
        ('[{"a": "1,b"}, {"a": "1", "b": 1}]', True),
        ('[["a", "b"], ["a\\",\\"b"]]', True),
        ('["\\u00e9", "é"]', False),
        ("[[], {}]", True),
        ("3", True),
    ],
)
def test_unique_items_are_those_that_no_other_item_equals(items: str, unique: bool) -> None:
    for draft in ("https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#"):
        found = grade(items, {"$schema": draft, "uniqueItems": True})
        assert (found.score, found.reason) == ((1, None) if unique else (0, "$ fails 'uniqueItems'"))
        assert grade(items, {"$schema": draft, "uniqueItems": False}).score == 1


def test_unique_items_are_found_without_comparing_every_two() -> None:
    objects = json.dumps([{"a": number} for number in range(5000)])
    mixed = json.dumps([number if number % 2 else str(number) for number in range(6000)])
    started = time.process_time()
    for text in (objects, mixed):
        assert grade(text, {"uniqueItems": True}).score == 1
    assert time.process_time() - started < 5.0  # a minute where every two are compared


def test_fences_without_end_take_no_time_in_proportion_to_their_square() -> None:
    started = time.process_time()
    assert grade("```a\n" * 40_000).score == 0
    assert time.process_time() - started < 5.0
