"""Words of YAML 1.2, against the tables of its specification (section 10.3.2), and against Python for numbers."""

import math

import pytest

from proximo.config.schema.positioned_yaml import plain_scalar


@pytest.mark.parametrize("word", ["null", "Null", "NULL", "~", ""])
def test_null_has_five_spellings(word):
    assert plain_scalar(word) is None


@pytest.mark.parametrize(("word", "value"), [("true", True), ("True", True), ("TRUE", True), ("false", False)])
def test_truth_values_are_spelt_out(word, value):
    assert plain_scalar(word) is value


@pytest.mark.parametrize(
    ("word", "value"),
    [("0", 0), ("-19", -19), ("+12", 12), ("017", 17), ("0o17", 15), ("0o7", 7), ("0x3A", 58), ("0xff", 255)],
)
def test_integers_are_decimal_octal_or_hexadecimal(word, value):
    assert plain_scalar(word) == value
    assert type(plain_scalar(word)) is int


@pytest.mark.parametrize("word", ["1e-5", "1E5", ".5", "0.", "-0.0", "+12e03", "-2E+05", "3.14", "1e3"])
def test_floats_are_what_python_reads(word):
    assert plain_scalar(word) == float(word)
    assert type(plain_scalar(word)) is float


def test_infinity_and_not_a_number_begin_with_a_dot():
    assert plain_scalar("-.inf") == -math.inf
    assert plain_scalar(".INF") == math.inf
    assert math.isnan(plain_scalar(".nan"))


@pytest.mark.parametrize(
    "word",
    [
        "no",
        "yes",
        "on",
        "off",
        "y",
        "N",
        "12:30",
        "1:30:00",
        "2020-01-01",
        "1_000",
        "0b1",
        "inf",
        "nan",
        "1e",
        ".",
        "-",
        "tRue",
        "0o8",
        "-0o7",
        "1e-5x",
        "٣",
    ],
)
def test_everything_else_is_text(word):
    assert plain_scalar(word) == word


def test_no_length_of_digits_breaks_the_reading():
    assert plain_scalar("9" * 5000) == math.inf
