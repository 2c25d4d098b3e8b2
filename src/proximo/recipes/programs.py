"""Generates small programming problems with tests: "write f(x): add 3, then square it".

Row i depends only on (seed, i), and whether a problem is held out only on its words. Functions of this module compute
the results that tests expect; no generated program is run.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from proximo.errors import ConfigError

SPLITS = ("train", "held_out")
HELD_OUT_EVERY = 5
"""One problem in five is held out."""
INPUTS = (-7, -2, 0, 1, 3, 8)
LISTS = ((), (4,), (-3, 2, 7, 0), (5, 5, -8, 1, 6), (9, -1, -4))


class Part(NamedTuple):
    """A part of a program: an operation on a whole number, a choice of numbers, or the last operation on their list."""

    words: str
    code: str
    """An operation has `{}` in place of what it is applied to."""
    value: Callable[[Any], Any]


CHOICES = (
    Part("even", "x % 2 == 0", lambda x: x % 2 == 0),
    Part("odd", "x % 2 == 1", lambda x: x % 2 == 1),
    Part("positive", "x > 0", lambda x: x > 0),
    Part("negative", "x < 0", lambda x: x < 0),
)
LIST_OPERATIONS = (
    Part("add them up", "sum({})", sum),
    Part("count them", "len({})", len),
    Part("sort them", "sorted({})", sorted),
    Part("list them", "{}", list),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """`f(x)` applies its steps in order; with a choice, `f(xs)` applies them to each chosen number, then `ending`."""

    steps: tuple[Part, ...]
    choice: Part | None = None
    ending: Part | None = None

    @property
    def words(self) -> str:
        """The task in words, as the prompt states it."""
        steps = ", then ".join(step.words for step in self.steps)
        if self.choice is None or self.ending is None:
            return f"Write f(x): {steps}."
        return f"Write f(xs): of the {self.choice.words} numbers {steps}, then {self.ending.words}."

    @property
    def code(self) -> str:
        """A program that solves the task."""
        return _program(self.steps, self.choice, self.ending)

    @property
    def tests(self) -> list[str]:
        """Assert statements that hold for a right program."""
        if self.choice is None or self.ending is None:
            return [f"assert f({x}) == {_apply(self.steps, x)}" for x in INPUTS]
        choice, ending = self.choice, self.ending
        results = [ending.value([_apply(self.steps, x) for x in xs if choice.value(x)]) for xs in LISTS]
        return [f"assert f({list(xs)}) == {value}" for xs, value in zip(LISTS, results, strict=True)]


def rows(num_rows: int, seed: int, *, split: str = "train", careless: float = 0.0) -> Iterator[dict[str, Any]]:
    """`prompt`, `response` (a program) and `test_list`, the assert statements that it must pass.

    `careless` is the share of responses with a slip, so that a fine-tuned model has something left to learn.

    Raises:
        ConfigError: the split is unknown, or `careless` is not from 0 to 1.
    """
    if split not in SPLITS:
        raise ConfigError(f"the split of the programs must be one of {', '.join(SPLITS)}, got {split!r}")
    if not 0 <= careless <= 1:
        raise ConfigError(f"careless is a share from 0 to 1, got {careless}")
    for row in range(num_rows):
        rng = Random(f"{seed}/{split}/{row}")
        problem = _problem(rng)
        while is_held_out(problem) != (split == "held_out"):
            problem = _problem(rng)
        code = _careless(rng, problem) if rng.random() < careless else problem.code
        yield {"prompt": f"{problem.words}\n", "response": code, "test_list": problem.tests}


def is_held_out(problem: Problem) -> bool:
    """Whether a problem belongs to the held-out split."""
    return hashlib.blake2b(problem.words.encode(), digest_size=4).digest()[0] % HELD_OUT_EVERY == 0


def _problem(rng: Random) -> Problem:
    if rng.random() < 0.3:
        return Problem(steps=(_step(rng),), choice=rng.choice(CHOICES), ending=rng.choice(LIST_OPERATIONS))
    return Problem(steps=tuple(_step(rng) for _ in range(rng.choice((2, 2, 3)))))


def _step(rng: Random) -> Part:
    n = rng.randint(2, 9)
    return rng.choice(
        (
            Part(f"add {n}", f"{{}} + {n}", lambda x: x + n),
            Part(f"subtract {n}", f"{{}} - {n}", lambda x: x - n),
            Part(f"multiply by {n}", f"{{}} * {n}", lambda x: x * n),
            Part(f"take it from {n}", f"{n} - {{}}", lambda x: n - x),
            Part(f"take the remainder by {n}", f"{{}} % {n}", lambda x: x % n),
            Part(f"divide by {n}", f"{{}} // {n}", lambda x: x // n),
            Part("square it", "{} ** 2", lambda x: x * x),
            Part("negate it", "-{}", lambda x: -x),
        )
    )


def _apply(steps: Sequence[Part], x: int) -> int:
    for step in steps:
        x = step.value(x)
    return x


def _program(
    steps: Sequence[Part], choice: Part | None = None, ending: Part | None = None, *, brackets: bool = True
) -> str:
    inner = "x"
    for step in steps:
        inner = step.code.format(f"({inner})" if inner != "x" and brackets else inner)
    if ending is None:
        return f"def f(x):\n    return {inner}"
    condition = "" if choice is None else f" if {choice.code}"
    return f"def f(xs):\n    return {ending.code.format(f'[{inner} for x in xs{condition}]')}"


def _careless(rng: Random, problem: Problem) -> str:
    """A program with one slip: no brackets, steps in the wrong order, a step or the choice missing, a wrong number.

    Some slips do no harm, for example (x + 2) + 3 without its brackets.
    """
    steps, choice, ending = problem.steps, problem.choice, problem.ending
    slip = rng.choice(("missing", "choice", "number") if ending else ("brackets", "order", "missing", "number"))
    if slip == "brackets":
        return _program(steps, brackets=False)
    if slip == "order":
        return _program(steps[::-1])
    if slip == "choice":
        return _program(steps, rng.choice((None, *CHOICES)), ending)
    gone = rng.randrange(len(steps))
    others = (
        (*steps[:gone], *steps[gone + 1 :]) if slip == "missing" else (*steps[:gone], _step(rng), *steps[gone + 1 :])
    )
    return _program(others, choice, ending)
