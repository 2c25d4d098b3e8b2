"""math-verify behind the grammar: what it is asked, what it never sees, and its limit of time."""

import signal
import threading
import time

import pytest
from maths_verifiers import graded

from proximo_verifiers.maths.symbols import OutOfTimeError, SymbolicComparison, bounded, is_fit, is_installed

INSTALLED = pytest.mark.skipif(not is_installed(), reason="the extra maths is not installed")
SAME = (
    ("\\sin^2 x + \\cos^2 x", "1"),
    ("\\log_2 8", "3"),
    ("2^n", "4^{n/2}"),
    ("\\sqrt{3+2\\sqrt2}", "1+\\sqrt2"),
    ("x + 1 \\le 5", "x \\le 4"),
    ("(0,2) \\cup (1,3)", "(0,3)"),
    ("e^{2x}", "(e^x)^2"),
    ("\\sin x", "y = \\sin x"),
    ("f(x) = \\sin(2x)", "2 \\sin x \\cos x"),
    ("\\sin(2x)", "y = \\sin(2x) = 2 \\sin x \\cos x"),
)
DIFFERENT = (
    ("\\sin x", "2 \\sin x"),
    ("x + 1 \\le 5", "x < 4"),
    ("\\log_2 8", "4"),
    ("2^n", "4^n"),
    ("\\sin x", "\\cos x = \\sin x"),
    ("\\sin x", "y = \\cos x = \\sin x"),
    ("\\cos x = \\sin x", "\\sin x"),
    ("\\sin x + \\cos y = 1", "\\sin x + \\tan y = 1"),
    ("\\cos x = \\sin x", "\\tan x = \\sin x"),
    ("(0,2) \\cup (3,4)", "(0,4)"),
)
ROUNDED = (
    ("\\ln 2", "0.693147"),
    ("\\sqrt[3]{2}", "1.259921"),
    ("\\frac{\\ln 2}{10000000}", "0.0"),
)
UNFIT = (
    "x" * 301,
    "(" * 11 + "5" + ")" * 11,
    ")5(",
    "(5",
    "\\boxed{5",
    "5\\text{6}",
    "12345678901234",
    "2^{3^x}",
    "2^x^x",
    "2^{1000}",
    "2^(x+1)",
    "10**1000",
    "x!",
    "\\newcommand{\\a}{5}",
    "\\int x",
    "\\sum_{n}",
    "\\input{a}",
    "'5'",
    '"5"',
    "a__b",
    "5\0",
    "\u0665",
    "x;y",
    "a^2b^2c^2d^2a^2b^2c^2d^2a^2",
)


@pytest.mark.parametrize("text", UNFIT)
def test_sympy_never_sees_what_may_grow(text: str) -> None:
    assert not is_fit(text)


@pytest.mark.parametrize("text", [text for pair in (*SAME, *DIFFERENT) for text in pair])
def test_sympy_sees_ordinary_answers(text: str) -> None:
    assert is_fit(text)


@INSTALLED
@pytest.mark.parametrize(("pairs", "right"), [(SAME, True), (DIFFERENT, False)])
def test_math_verify_decides_what_the_grammar_does_not(pairs: tuple[tuple[str, str], ...], right: bool) -> None:
    for reference, answer in pairs:
        grade = graded(f"\\boxed{{{answer}}}", reference, symbolic="always", symbolic_cpu_seconds=10.0)
        assert grade.score == float(right), (reference, answer)
        assert grade.components["by_symbols"] == 1.0


@INSTALLED
@pytest.mark.parametrize(("reference", "answer"), ROUNDED)
def test_the_first_digits_of_a_number_are_not_the_number(reference: str, answer: str) -> None:
    """math-verify compares them to six places."""
    assert graded(f"\\boxed{{{answer}}}", reference, symbolic="always").score == 0.0
    assert graded(f"\\boxed{{{reference}}}", answer, symbolic="always").score == 0.0


@INSTALLED
def test_math_verify_is_stopped_after_its_processor_time() -> None:
    text = "\\boxed{\\sin^{99}(x^{99}+\\cos^{99}(x^{99}))}"
    graded("\\boxed{\\cos x}", "\\sin x", symbolic="always")  # loads sympy
    start = time.process_time()
    grade = graded(text, "5", symbolic="always", symbolic_cpu_seconds=0.2, incorrect_score=-1.0)
    assert time.process_time() - start < 0.6
    assert grade.score == -1.0
    assert grade.reason == "math-verify took too long to compare it"


@INSTALLED
def test_math_verify_works_in_a_thread_too() -> None:
    found = []
    comparison = SymbolicComparison(1.0)
    thread = threading.Thread(target=lambda: found.append(comparison.any_same(["\\sin^2 x + \\cos^2 x"], "1")))
    thread.start()
    thread.join()
    assert found == [True]


def endless(swallowed: list[OutOfTimeError]) -> None:
    """Works on, and takes the first stop for an ordinary error."""
    with bounded(0.05):
        try:
            while True:
                sum(range(1000))
        except OutOfTimeError as error:
            swallowed.append(error)
        while True:
            sum(range(1000))


def test_the_timer_ends_even_what_swallows_it_and_leaves_nothing_behind() -> None:
    before = signal.getsignal(signal.SIGPROF)
    swallowed: list[OutOfTimeError] = []
    start = time.process_time()
    with pytest.raises(OutOfTimeError):
        endless(swallowed)
    assert len(swallowed) == 1
    assert time.process_time() - start < 1.0
    assert signal.getsignal(signal.SIGPROF) is before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
