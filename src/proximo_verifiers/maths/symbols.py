"""Compares answers with math-verify (sympy) if the exact grammar cannot parse them. Runs in workers only.

Only the LaTeX parser of math-verify is used, which builds expressions from a syntax tree; the parser of plain text
would evaluate them as Python. Texts that are long, deeply nested or expensive to evaluate are never passed on. A timer
bounds the processor time in the main thread, where a worker runs this; the deadline of the worker is a second bound.
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

from proximo_verifiers.errors import MissingExtraError
from proximo_verifiers.maths.cleaning import clean, uniform

MAX_CHARACTERS = 300
MAX_NESTING = 10
MAX_DIGITS = 12
"""Largest number of digits of a number. The grammar handles longer ones, and sympy should not expand them."""
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
"""math-verify drops text mode as a unit, so 5\\text{6} would be 5."""
_EQUALS = re.compile(r"(?<![<>:=])=(?!=)")
_DECIMAL = re.compile(r"\d?\.\d")
_NAMED = re.compile(r"(?:^|(?<=[,;(\[{&]))\s*\\?[A-Za-z]+'?(?:_\{?\w\}?)?(?:\^\{-1\})?(?:\([A-Za-z, ]+\))?\s*=")
"""A name before a value, which is not a side of an equation."""


class OutOfTimeError(BaseException):
    """The comparison used up its processor time. Not an Exception, so that no library catches it."""


def is_installed() -> bool:
    """True if the packages of the extra `maths` are installed."""
    return all(find_spec(name) is not None for name in ("math_verify", "latex2sympy2_extended", "sympy"))


def is_fit(text: str) -> bool:
    """True if the text is safe for sympy: short, shallow, of known commands, without large numbers or exponents."""
    if len(text) > MAX_CHARACTERS or not text.isascii() or not text.isprintable() or _UNFIT.search(text):
        return False
    if _LONG_NUMBER.search(text) or _HIDDEN_DIGITS.search(text) or not set(_COMMAND.findall(text)) <= _COMMANDS:
        return False
    return _is_shallow(text) and _has_small_exponents(text)


def _is_shallow(text: str) -> bool:
    """True if brackets are balanced and not nested too deeply. All kinds are one, so (0,1] is balanced."""
    depth = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        if not 0 <= depth <= MAX_NESTING:
            return False
    return depth == 0


def _has_small_exponents(text: str) -> bool:
    """True if no exponent contains an exponent, and numbers in exponents are small."""
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
    """Comparisons by math-verify. It is loaded when a worker starts, so that no answer pays for the import."""

    def __init__(self, cpu_seconds: float) -> None:
        """`cpu_seconds` bounds each comparison. Raises MissingExtraError if math-verify is not installed."""
        if not is_installed():
            raise MissingExtraError(
                "comparing answers symbolically needs math-verify, which is not installed: "
                "pip install 'math-verify>=0.9,<0.10'"
            )
        self._cpu_seconds = cpu_seconds
        self._package = _math_verify()

    def any_same(self, references: Sequence[str], answer: str) -> bool | None:
        """Whether math-verify says that the answer equals one of the references; None if some are undecided.

        Raises OutOfTimeError if all references together take more than the processor time.
        """
        results = set()
        with bounded(self._cpu_seconds):
            for reference in references:
                results.add(self._same(reference, answer))
                if True in results:
                    return True
        return None if None in results else False

    def _same(self, reference: str, answer: str) -> bool | None:
        """Compares the texts or, if only one is an equation, the other text with each of its sides.

        math-verify would compare with the last side alone, whether or not the other sides equal it.
        """
        sides = [_EQUALS.split(_NAMED.sub("", clean(text))) for text in (reference, answer)]
        if (len(sides[0]) > 1) == (len(sides[1]) > 1):
            return self._ask(reference, answer)
        results = {self._ask(one, other) for one in sides[0] for other in sides[1]}
        return False if False in results else None if None in results else True

    def _ask(self, reference: str, answer: str) -> bool | None:
        """Whether math-verify accepts the pair in either order; None if a text is unfit or cannot be parsed."""
        reference, answer = uniform(reference), uniform(answer)
        if not is_fit(reference) or not is_fit(answer):
            return None
        if bool(_DECIMAL.search(reference)) != bool(_DECIMAL.search(answer)):
            # math-verify would compare a decimal with an exact number to six places only.
            return None
        try:
            gold, target = (_parsed(self._package, text) for text in (reference, answer))
            if not gold or not target:
                return None
            return any(
                self._package.verify(*pair, timeout_seconds=None, raise_on_error=True)
                for pair in ((gold, target), (target, gold))
            )
        except Exception:  # any failure of sympy leaves the pair undecided
            return None


@cache
def _math_verify() -> Any:
    """math-verify, after one parse, since the first parse is slow."""
    # It warns without a timeout of its own.
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
    """Raises OutOfTimeError in the block after `cpu_seconds` of processor time. Has no effect outside the main
    thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _armed(), _timed(cpu_seconds):
        yield


@contextmanager
def _armed() -> Generator[None]:
    """Installs the signal handler. The signal may arrive while `_timed` exits; this block then stops the timer."""
    before = signal.signal(signal.SIGPROF, _stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def _timed(cpu_seconds: float) -> Generator[None]:
    # Repeat every 0.1 s, in case a library swallows the exception once.
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _stop(number: int, frame: object) -> None:  # noqa: ARG001
    raise OutOfTimeError
