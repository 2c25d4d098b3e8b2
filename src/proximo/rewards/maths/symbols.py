"""math-verify behind the exact grammar: sympy decides what the grammar cannot read. Not in the trainer's process.

Only its LaTeX parser is used, which builds expressions from a syntax tree; the one for plain text would evaluate them.
A text is looked at before sympy sees it: what is long, deep or grows when it is evaluated is not asked. Processor time
is bounded by a timer where this runs in the main thread, as it does in a worker; the worker's deadline is above it.
"""

import logging
import re
import signal
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from proximo.errors import MissingExtraError
from proximo.rewards.maths.cleaning import clean
from proximo.rewards.maths.notation import uniform

MAX_CHARACTERS = 300
MAX_NESTING = 10
MAX_DIGITS = 12
"""Of one number; longer ones are exact in the grammar or nothing that sympy should multiply out."""
MAX_EXPONENT_DIGITS = 3
MAX_POWERS = 8
COMMANDS = (
    "frac dfrac tfrac sqrt cdot times div pm mp pi infty cup cap in notin le ge leq geq lt gt ne neq approx equiv "
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp deg circ degree text mathrm mbox mathbf "
    "textbf mathbb mathcal left right begin end pmatrix bmatrix emptyset varnothing setminus subset subseteq mid vert "
    "lvert rvert lfloor rfloor lceil rceil overline alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta "
    "iota kappa lambda mu nu xi rho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi "
    "Omega ldots dots cdots quad binom angle land lor to forall"
)
_COMMANDS = frozenset(COMMANDS.split())
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_LONG_NUMBER = re.compile(rf"[\d.,]{{{MAX_DIGITS + 1},}}")
_POWER = re.compile(r"(?:\^|\*\*)\s*(\{[^{}]*\}|\d+|\\?\S)(.?)")
_UNFIT = re.compile(r"[\"'`@#&;]|__|!|\*\*\s*\(|\^\s*\(")
_HIDDEN_DIGITS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{[^{}]*\d")
"""math-verify leaves out what stands in text mode, as it does with units: 5\\text{6} would be 5."""
_EQUALS = re.compile(r"(?<![<>:=])=(?!=)")
_DECIMAL = re.compile(r"\d?\.\d")
_NAMED = re.compile(r"(?:^|(?<=[,;(\[{&]))\s*\\?[A-Za-z]+'?(?:_\{?\w\}?)?(?:\^\{-1\})?(?:\([A-Za-z, ]+\))?\s*=")
"""A name before a value, which is no side of an equation."""


class OutOfTimeError(BaseException):
    """The comparison used up its processor time. No Exception, so that nothing below swallows it."""


def is_installed() -> bool:
    """Whether the extra `maths` is there."""
    return all(find_spec(name) is not None for name in ("math_verify", "latex2sympy2_extended", "sympy"))


def is_fit(text: str) -> bool:
    """Whether sympy may see the text: short, shallow, of known commands, without large numbers or exponents."""
    if len(text) > MAX_CHARACTERS or not text.isascii() or not text.isprintable() or _UNFIT.search(text):
        return False
    if _LONG_NUMBER.search(text) or _HIDDEN_DIGITS.search(text) or not set(_COMMAND.findall(text)) <= _COMMANDS:
        return False
    return _is_shallow(text) and _has_small_exponents(text)


def _is_shallow(text: str) -> bool:
    """Brackets open before they close, all of them, and not too many in one another; (0,1] is one pair."""
    depth = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        if not 0 <= depth <= MAX_NESTING:
            return False
    return depth == 0


def _has_small_exponents(text: str) -> bool:
    """No exponent in an exponent, and of numbers only small ones."""
    if text.count("^") + text.count("**") > MAX_POWERS:
        return False
    for match in _POWER.finditer(text):
        exponent = match[1].strip("{}")
        if "^" in exponent or match[2] == "^" or (match[1] == "{" and exponent == ""):
            return False
        if any(len(digits) > MAX_EXPONENT_DIGITS for digits in re.findall(r"\d+", exponent)):
            return False
    return True


class SymbolicComparison:
    """math-verify, loaded when a worker starts: no answer is to pay for that with its time."""

    def __init__(self, cpu_seconds: float) -> None:
        """Raises MissingExtraError where it is not installed."""
        if not is_installed():
            raise MissingExtraError(
                "comparing answers symbolically needs math-verify, which is not installed: pip install 'proximo[maths]'"
            )
        self._cpu_seconds = cpu_seconds
        self._package = _math_verify()

    def any_same(self, references: Sequence[str], answer: str) -> bool | None:
        """Whether math-verify says that the answer is one of the references; None where it is not known of some.

        Raises OutOfTimeError where it does not decide within its processor time, which is for all of them.
        """
        found = set()
        with bounded(self._cpu_seconds):
            for reference in references:
                found.add(self._same(reference, answer))
                if True in found:
                    return True
        return None if None in found else False

    def _same(self, reference: str, answer: str) -> bool | None:
        """What is said of the two texts, or where one of them alone is an equation, of each of its sides.

        math-verify would take the last side for all of it, whether the others are equal to it or not.
        """
        sides = [_EQUALS.split(_NAMED.sub("", clean(each))) for each in (reference, answer)]
        if (len(sides[0]) > 1) == (len(sides[1]) > 1):
            return self._ask(reference, answer)
        found = {self._ask(one, other) for one in sides[0] for other in sides[1]}
        return False if False in found else None if None in found else True

    def _ask(self, reference: str, answer: str) -> bool | None:
        """What math-verify says, either way round; None where it was not asked, or cannot read one of the two."""
        reference, answer = uniform(reference), uniform(answer)
        if not is_fit(reference) or not is_fit(answer):
            return None
        if bool(_DECIMAL.search(reference)) != bool(_DECIMAL.search(answer)):
            # It compares those two to six places, and the first digits of a number are not the number.
            return None
        try:
            gold, target = (_parsed(self._package, each) for each in (reference, answer))
            if not gold or not target:
                return None
            return any(
                self._package.verify(*pair, timeout_seconds=None, raise_on_error=True)
                for pair in ((gold, target), (target, gold))
            )
        except Exception:  # whatever sympy stumbles over, it has not compared the two
            return None


@cache
def _math_verify() -> Any:
    """The package, once it has parsed something: its first parse is slow, and the time of an answer is not for that."""
    # It would warn that nobody bounds its time.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    package = import_module("math_verify")
    _parsed(package, "\\sin x")
    return package


def _parsed(package: Any, text: str) -> list[Any]:
    latex = [package.LatexExtractionConfig(boxed_match_priority=0)]
    return package.parse(
        f"$\\boxed{{{text}}}$", extraction_config=latex, fallback_mode="no_fallback", parsing_timeout=None
    )


@contextmanager
def bounded(cpu_seconds: float) -> Generator[None]:
    """Raises OutOfTimeError in the block after so much processor time; in another than the main thread, never."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _armed(), _timed(cpu_seconds):
        yield


@contextmanager
def _armed() -> Generator[None]:
    """With what the signal raises; it may arrive while `_timed` is left, and then this is the block that clears up."""
    before = signal.signal(signal.SIGPROF, _stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def _timed(cpu_seconds: float) -> Generator[None]:
    # Again and again, in case that something in between swallows it once.
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _stop(number: int, frame: object) -> None:  # noqa: ARG001
    raise OutOfTimeError
