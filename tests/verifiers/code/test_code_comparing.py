"""When an output or a returned value is the expected one."""

import pytest

from proximo_verifiers.code.stdio import same_output, same_value

NAN = float("nan")
OUTPUTS = (
    ("equal", "1\n2\n", "1\n2\n", None, True),
    ("no line end at the end", "1\n2", "1\n2\n", None, True),
    ("windows line ends", "1\r\n2\r\n", "1\n2\n", None, True),
    ("spaces at the end of lines", "1  \n2\t\n", "1\n2\n", None, True),
    ("empty lines at the end", "1\n\n\n", "1", None, True),
    ("both empty", "", "\n", None, True),
    ("an empty line inside", "1\n\n2", "1\n2", None, False),
    ("spaces before", " 1", "1", None, False),
    ("two spaces for one", "1  2", "1 2", None, False),
    ("another line break", "1 2", "1\n2", None, False),
    ("less", "1", "1\n2", None, False),
    ("more", "1\n2\n3", "1\n2", None, False),
    ("nothing", "", "1", None, False),
    ("another case", "yes", "YES", None, False),
    ("a float written otherwise", "0.50", "0.5", None, False),
    ("a float within", "0.5000001", "0.5", 1e-6, True),
    ("a float outside", "0.51", "0.5", 1e-6, False),
    ("a large float, relatively", "1000000.5", "1000000.0", 1e-6, True),
    ("an exponent", "5e-1", "0.5", 1e-6, True),
    ("an integer for a float", "1", "1.0", 1e-6, True),
    ("integers have no tolerance", "1000001", "1000000", 1e-3, False),
    ("words have none either", "a", "b", 1e-3, False),
    ("nan is no number", "nan", "0.5", 1e9, False),
    ("inf is no number", "inf", "1e300", 1e9, False),
    ("an overflow is no number", "1e999", "1.0", 1e9, False),
    ("an underscore is no number", "1_0.0", "10.0", 1e-6, False),
    ("digits of another script are none", "\u0661.0", "1.0", 1e-6, False),
    ("a long number is a word", "1." + "0" * 500, "1.0", 1e-6, False),
    ("with a tolerance lines may break elsewhere", "1.0 2.0", "1.0\n2.0", 1e-6, True),
    ("a word more", "0.5 x", "0.5", 1e-6, False),
)


@pytest.mark.parametrize(("name", "written", "expected", "tolerance", "same"), OUTPUTS, ids=[c[0] for c in OUTPUTS])
def test_outputs_are_compared_as_verifiers_do(name, written, expected, tolerance, same) -> None:
    assert same_output(written, expected, tolerance=tolerance) is same


VALUES = (
    (1, 1, True),
    (1.0, 1, True),
    (1, 1.0, True),
    (True, 1, False),
    (1, True, False),
    (True, True, True),
    (None, None, True),
    (0, None, False),
    ("1", 1, False),
    ("a", "a", True),
    ((1, 2), [1, 2], True),
    ([1, [2]], [1, [2]], True),
    ([1, 2], [1], False),
    ({1, 2}, [1, 2], False),
    ({"a": 1}, {"a": 1}, True),
    ({1: "a"}, {"1": "a"}, True),
    ({1: "a", "1": "b"}, {"1": "a"}, False),
    ({"a": 1}, {"a": True}, False),
    (NAN, 1.0, False),
    (b"a", "a", False),
    (10**4000, 1.5, False),
    (1.0000001, 1.0, False),
)


@pytest.mark.parametrize(("found", "expected", "same"), VALUES)
def test_values_are_compared_with_their_types(found, expected, same) -> None:
    assert same_value(found, expected, tolerance=None) is same


def test_values_within_a_tolerance_are_the_same() -> None:
    assert same_value([1.0000001], [1.0], tolerance=1e-6)
    assert not same_value([1.1], [1.0], tolerance=1e-6)
    assert not same_value(10**4000, 1.5, tolerance=1e-6)
    assert not same_value(NAN, 1.0, tolerance=1e-6)
    assert not same_value(1000001, 1000000, tolerance=1e-3)
