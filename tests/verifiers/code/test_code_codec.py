"""What crosses between the two processes, in both directions, and what does not."""

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple

import pytest

from proximo_verifiers.code.inside.codec import (
    MAX_CLASSES,
    MAX_DEPTH,
    MAX_SAME_HASH,
    ValueDecoder,
    ValueEncoder,
    ValueRefusedError,
    exception_class,
)

Pair = namedtuple("Pair", "a b")


class Colour(enum.IntEnum):
    RED = 3


class AlwaysEqual(int):
    __hash__ = int.__hash__

    def __eq__(self, other):
        return True


class Overridden(list):
    def __iter__(self):
        return iter(["forged"])


def no_object(*arguments):
    raise ValueRefusedError(f"an object: {arguments}")


def crossed(value):
    tree = json.loads(json.dumps(ValueEncoder([], no_object).tree(value)))
    return ValueDecoder([], no_object, {}).value(tree)


def same(a, b) -> bool:
    """Equal with equal types all the way down, and for floats equal bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return math.copysign(1, a) == math.copysign(1, b) and (a == b or (math.isnan(a) and math.isnan(b)))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same, a, b)) and all(map(same, a.values(), b.values()))
    return a == b


PLAIN = (
    *(None, True, False, 0, -1, 2**70, -(10**4000), 0.0, -0.0, 0.1, 1e308, math.nan, math.inf, -math.inf),
    *(1j, complex(-0.0, math.nan), "", "é\u2028\x00", "\ud800", b"", bytes(range(256))),
    *([], [[]], (), (1,), {}, {1: "a", "1": 2, (1, 2): []}, set(), {1, "a", (2,)}, frozenset({1}), range(0, 9, 2)),
    *([None, True, [1.5, "x", (b"y", {"z": {2}})]], int, type(None), ValueError),
)


@pytest.mark.parametrize("value", PLAIN, ids=[f"{i} {type(value).__name__}" for i, value in enumerate(PLAIN)])
def test_a_plain_value_arrives_with_its_exact_type(value) -> None:
    if isinstance(value, complex):
        assert repr(crossed(value)) == repr(value)
    else:
        assert same(crossed(value), value)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Colour.RED, 3),
        (AlwaysEqual(4), 4),
        (Overridden([1, 2]), [1, 2]),
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (Pair(1, 2), (1, 2)),
    ],
)
def test_a_subclass_arrives_as_the_type_it_is_made_of(value, plain) -> None:
    assert same(crossed(value), plain)
    assert same(crossed([value]), [plain])


@pytest.mark.parametrize("value", [object(), len, (i for i in "ab"), {"a": 1}.keys(), memoryview(b"a"), [object()]])
def test_anything_else_is_refused(value) -> None:
    with pytest.raises(ValueRefusedError):
        crossed(value)


def test_what_is_nested_too_deeply_is_refused_on_both_sides() -> None:
    value: list = []
    tree: list = ["l"]
    for _ in range(MAX_DEPTH + 1):
        value, tree = [value], ["l", tree]
    with pytest.raises(ValueRefusedError):
        crossed(value)
    with pytest.raises(ValueRefusedError):
        ValueDecoder([], no_object, {}).value(tree)


def test_one_list_in_two_places_stays_one_list() -> None:
    inner: list = [1]
    a, b = crossed([inner, inner])
    a.append(2)
    assert b == [1, 2]


def test_a_list_that_holds_itself_arrives_as_one() -> None:
    value: list = [1]
    value.append(value)
    found = crossed(value)
    assert found[0] == 1
    assert found[1] is found


TREES = (
    *([], [1], [None], [["l"]], ["?"], ["q", 1], {}, {"l": 1}, ["d", 1], ["s", ["l"]], ["d", ["l"], 1]),
    *(["c", 1, 2], ["c", 1.0], ["b", "\u0100"], ["b", 1], ["R", 1, 2, 0], ["R", 1, 2], ["R", True, 2, 3]),
    *(["T", "object2"], ["T", "type"], ["T", 1], ["r", 0], ["r", -1], ["r", True], ["r"], ["o", 1], ["p", 0]),
    *(["x"], ["x", 1], ["x", "not a name", "Exception"], ["x", "a\x00", "Exception"], ["z", ["l"]], ["t", ["?"]]),
)


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_a_tree_that_no_encoder_writes_is_refused(tree) -> None:
    with pytest.raises(ValueRefusedError):
        ValueDecoder([], no_object, {}).value(tree)


@pytest.mark.parametrize(
    ("names", "base"),
    [
        (["ValueError"], ValueError),
        (["Odd", "ValueError"], ValueError),
        (["Odd", "SystemExit"], Exception),
        (["SystemExit"], Exception),
        (["eval"], Exception),
        (["AssertionError", "eval"], Exception),
    ],
)
def test_an_exception_arrives_as_a_class_that_is_built_in_or_made_for_its_name(names, base) -> None:
    made: dict = {}
    found = ValueDecoder([], no_object, made).value(["x", *names])
    assert issubclass(found, Exception)
    assert found is base or found.__bases__ == (base,)
    assert found.__name__ == names[0]
    assert ValueDecoder([], no_object, made).value(["x", *names]) is found


def test_keys_that_all_have_one_hash_are_refused() -> None:
    modulus = 2**61 - 1
    keys = [modulus * n for n in range(1, MAX_SAME_HASH + 2)]
    assert len({hash(key) for key in keys}) == 1
    for tree in (["s", *keys], ["z", *keys], ["d", *(each for key in keys for each in (key, 0))]):
        with pytest.raises(ValueRefusedError):
            ValueDecoder([], no_object, {}).value(tree)
    assert crossed(set(range(1000))) == set(range(1000))


def test_no_more_classes_of_exceptions_are_made_than_an_honest_program_has() -> None:
    made: dict[str, type] = {}
    for number in range(MAX_CLASSES):
        exception_class([f"E{number}", "ValueError"], made)
    with pytest.raises(ValueRefusedError, match="classes of exceptions"):
        exception_class(["Another", "ValueError"], made)
    assert exception_class(["E0", "ValueError"], made) is made["E0"]
    assert exception_class(["KeyError"], made) is KeyError
