"""YAML documents: their values, their lines, and what is refused. Words follow YAML 1.2 (section 10.3.2)."""

import math

import pytest

from proximo.config.schema.positioned_yaml import as_yaml, parse_document, plain_scalar
from proximo.errors import ConfigError

TEXT = """\
run:
  folder: runs/x
  seed: 3
base: &base
  learning_rate: 1e-5
  schedule: linear
optimizer:
  <<: *base
  schedule: cosine
sources:
- path: a.jsonl
- {path: b.jsonl, weight: 2}
"""


def parse(text):
    return parse_document(text, "r.yaml")


def refusal(text):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    return str(caught.value)


def test_values_are_plain_and_anchors_and_merges_are_followed():
    assert parse(TEXT).data == {
        "run": {"folder": "runs/x", "seed": 3},
        "base": {"learning_rate": 1e-5, "schedule": "linear"},
        "optimizer": {"learning_rate": 1e-5, "schedule": "cosine"},
        "sources": [{"path": "a.jsonl"}, {"path": "b.jsonl", "weight": 2}],
    }


def test_of_several_merged_mappings_the_first_wins():
    data = parse("a: &a {x: 1, y: 1}\nb: &b {x: 2, z: 2}\nc:\n  <<: [*a, *b]\n").data
    assert data["c"] == {"x": 1, "y": 1, "z": 2}


VALUES = {
    None: ["null", "Null", "NULL", "~", ""],
    True: ["true", "True", "TRUE"],
    False: ["false", "FALSE"],
    17: ["017", "+17", "0o21", "0x11"],
    -19: ["-19"],
    math.inf: [".inf", "+.INF", "9" * 5000],
    -math.inf: ["-.inf"],
}
FLOATS = ("1e-5", "1E5", ".5", "0.", "-0.0", "+12e03", "-2E+05", "3.14", "1e3")
TEXTS = (
    *("no", "yes", "on", "off", "y", "N", "12:30", "1:30:00", "2020-01-01", "1_000", "0b1", "inf", "nan", "1e", "."),
    *("-", "tRue", "0o8", "-0o7", "1e-5x", "٣", "=", "<<"),
)


def test_unquoted_words_are_null_truth_values_numbers_or_text():
    for value, words in VALUES.items():
        for word in words:
            assert (plain_scalar(word), type(plain_scalar(word))) == (value, type(value)), word[:9]
    for word in FLOATS:
        assert (plain_scalar(word), type(plain_scalar(word))) == (float(word), float), word
    for word in TEXTS:
        assert plain_scalar(word) == word
    assert math.isnan(plain_scalar(".nan"))
    assert parse("%YAML 1.1\n---\na: [on, 017]\n").data == {"a": ["on", 17]}


def test_what_is_written_is_read_back_as_the_same_values():
    words = [word for words in VALUES.values() for word in words]
    tree = {"text": [*words, *FLOATS, *TEXTS, " a: b #", "two\nlines", "é"], "no": {"1": [1, 1e-5, True, None, []]}}
    assert parse(as_yaml(tree)).data == tree
    with pytest.raises(ConfigError, match="an object that is not a plain value"):
        as_yaml({"a": object()})


def test_quotes_make_text_of_anything():
    assert parse("a: '1e-5'\nb: \"null\"\nc: 'no'\nd: !!str 3\n").data == {
        "a": "1e-5",
        "b": "null",
        "c": "no",
        "d": "3",
    }


def test_keys_are_text_whatever_they_look_like():
    assert parse("0: a\nno: b\nnull: c\n").data == {"0": "a", "no": "b", "null": "c"}


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("run",), 1),
        (("run", "seed"), 3),
        (("run", "sed"), 1),
        (("optimizer", "schedule"), 9),
        (("optimizer", "learning_rate"), 5),
        (("sources", "1", "weight"), 12),
        (("sources", "7"), 10),
        (("nowhere", "else"), None),
    ],
)
def test_every_value_knows_its_line_and_what_is_missing_that_of_its_surroundings(path, line):
    assert parse(TEXT).line_of(path) == line


def test_a_key_given_twice_is_named_with_both_lines():
    assert refusal("a: 1\nb: 2\na: 3\n") == "r.yaml, line 3: a is given twice, first on line 1"
    assert "line 4: seed is given twice, first on line 2" in refusal("run:\n  seed: 1\n  folder: x\n  seed: 2\n")


def test_nothing_but_plain_values_can_come_out(tmp_path):
    trap = tmp_path / "trap"
    message = refusal(f"a: !!python/object/apply:os.mkdir ['{trap}']\n")
    assert "line 1" in message
    assert "python/object" in message
    assert not trap.exists()
    assert "not allowed" in refusal("a: !!binary aGk=\n")
    assert "not allowed" in refusal("a: !mine 3\n")
    assert "not allowed" in refusal("a: !!int x\n")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a: @sft\n", ["line 1, column 4", "quotes"]),
        ("a:\n\tb: 1\n", ["line 2, column 1", "spaces"]),
        ("a: b: c\n", ["line 1", "colon"]),
        ("a: [1, 2\nb: 3\n", ["line 2", "not valid YAML"]),
        ("a: 'x\n", ["not valid YAML"]),
        ("a: 1\n---\nb: 2\n", ["line 2", "another document"]),
        ("a: *nowhere\n", ["nowhere"]),
        ("<<: {a: 1}\n<<: {b: 2}\n", ["line 2", "given twice"]),
        ("a: &a [*a]\n", ["alias refers to its own anchor"]),
        ("? [1, 2]\n: 3\n", ["a key must be a word"]),
        ("<<: 3\n", ["needs a mapping"]),
        ("a: \x07\n", ["character 4"]),
        ("[" * 500, ["too deeply"]),
    ],
)
def test_broken_yaml_is_refused_with_its_place(text, pieces):
    message = refusal(text)
    assert message.startswith("r.yaml")
    for piece in pieces:
        assert piece in message
