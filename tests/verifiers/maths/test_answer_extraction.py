"""Where in a response its answer stands."""

import re
import time
import tracemalloc

import pytest

from proximo_verifiers.maths.extraction import PLACES, answers_in, boxed

BOXES = (
    ("\\boxed{5}", ["5"]),
    ("a \\boxed{1} b \\boxed{2}", ["1", "2"]),
    ("\\boxed{\\frac{1}{\\sqrt{2}}}", ["\\frac{1}{\\sqrt{2}}"]),
    ("\\boxed{\\{1, 2\\}}", ["\\{1, 2\\}"]),
    ("\\boxed{\\left\\{ x \\right.}", ["\\left\\{ x \\right."]),
    ("\\fbox{7}", ["7"]),
    ("\\boxed {7}", ["7"]),
    ("thus $\\boxed 5$.", ["5"]),
    ("\\boxed{\\boxed{5}}", ["\\boxed{5}"]),
    ("\\boxed{5", []),
    ("\\boxed{5} and \\boxed{6", ["5"]),
    ("{ \\boxed{5}", ["5"]),
    ("} \\boxed{5}", ["5"]),
    ("boxed{5}", []),
    ("\\boxed", []),
)


@pytest.mark.parametrize(("text", "found"), BOXES)
def test_boxes_are_read_with_their_braces(text: str, found: list[str]) -> None:
    assert boxed(text) == found


PLACED = (
    ("tags", "<think>4?</think>\n<answer> 5 </answer>", ["5"]),
    ("hash", "2 + 2 = 4\n#### 4", ["4"]),
    ("hash", "#### 1,000 \n#### 2", ["1,000", "2"]),
    ("phrase", "The answer is 5. I hope it is right.", ["5"]),
    ("phrase", "the final answer is: $x = 3.5$, as shown", ["x = 3.5"]),
    ("phrase", "Answer: 42", ["42"]),
    ("phrase", "The answer is **7**!", ["7"]),
    ("phrase", "The answer is \\(\\frac{1}{2}\\).", ["\\frac{1}{2}"]),
    ("phrase", "the answer is 3.25 dollars.\nBye", ["3.25 dollars"]),
    ("phrase", "**Answer:** 5", ["5"]),
    ("phrase", "**Final Answer**: **42**", ["42"]),
    ("phrase", "Therefore, the answer is:\n\n$5$", ["5"]),
    ("phrase", "The answer is\n\\[5\\]\nas shown", ["5"]),
    ("phrase", "**Answer**:\n5\nDone", ["5"]),
    ("phrase", "The answer is 5.\nThat is what the answer is\nDone", ["5"]),
    ("label", "so 3 eggs\nA: 3", ["3"]),
    ("label", "Q: A: 3", []),
    ("number", "first 3, then 4.5 and -7/2", ["3", "4.5", "-7/2"]),
    ("number", "5-3 makes 1,234,567.", ["5", "3", "1,234,567"]),
    ("pattern", "<<12>> <<13>>", ["12", "13"]),
    ("response", " 5 \n", ["5"]),
)


@pytest.mark.parametrize(("place", "text", "found"), PLACED)
def test_each_place_is_read_as_it_is_written(place: str, text: str, found: list[str]) -> None:
    assert answers_in(text, [place], re.compile(r"<<(.*?)>>")) == found


def test_every_place_has_an_example() -> None:
    assert {place for place, _, _ in PLACED} | {"boxed"} == set(PLACES)


def test_the_first_place_that_has_an_answer_counts() -> None:
    text = "the answer is 1\n#### 2\n\\boxed{3}"
    assert answers_in(text, ["boxed", "hash", "phrase"]) == ["3"]
    assert answers_in(text, ["phrase", "boxed"]) == ["1"]
    assert answers_in("#### \nthe answer is 1", ["boxed", "hash", "phrase"]) == ["1"]
    assert answers_in("nothing", ["boxed", "hash", "phrase"]) == []


def test_a_pattern_without_a_group_is_the_answer_as_a_whole() -> None:
    assert answers_in("x 12 y", ["pattern"], re.compile(r"\d+")) == ["12"]


@pytest.mark.parametrize("place", [place for place in PLACES if place != "pattern"])
def test_a_long_response_takes_time_in_proportion(place: str) -> None:
    pieces = ("\\boxed{", "}", "####", "the answer is ", "\nA:", "7,", "\\", " ", "1.", "{" * 3)
    for piece in pieces:
        start = time.thread_time()
        answers_in(piece * (200_000 // len(piece)), [place])
        assert time.thread_time() - start < 3, piece  # a tenth of it, where the machine is not shared


def test_boxes_in_boxes_take_memory_and_time_of_their_text_isolated() -> None:
    """Each holding its contents, 40,000 of them would take 7 GB."""
    text = "\\boxed{" * 40_000 + "5" + "}" * 40_000
    tracemalloc.start()
    found = answers_in(text, ["boxed"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [len(each) for each in found] == [len(text) - 8]
    assert peak < 100 * 2**20
