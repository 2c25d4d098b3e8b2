"""What a chain of equal signs is worth: `2 + 3 = 5` its value. Every side is looked at, not the last one alone."""

from collections.abc import Sequence

from proximo.rewards.maths.quotients import Arithmetic, Quotient, RefusedError, UnreadableError, letter
from proximo.rewards.maths.values import Equation, Value


def worth(name: str | None, sides: Sequence[Value], arithmetic: Arithmetic) -> Value:
    """The value of `name = side = side`, or of `side = side` without a name; of one side that side.

    Sides that are numbers are to be equal, else RefusedError. Behind a name formulas may stand before the value
    (`A = lw = 12`); a side that has no other letters than the last and differs from it makes it an equation in them.
    """
    last = sides[-1]
    if len(sides) > 1:
        chain = [side for side in sides if isinstance(side, Quotient)]
        if len(chain) < len(sides):
            raise UnreadableError("an equation of what is no number")
        numbers = [side for side in chain if not _letters(side)]
        if any(not arithmetic.equal(numbers[0], other) for other in numbers[1:]):
            raise RefusedError("an equation that does not hold")
        if name is None and len(numbers) < len(chain):
            if len(chain) > 2:
                raise UnreadableError("several equations in one")
            return Equation(None, *chain)
        for side in chain[:-1]:
            if _letters(side) <= _letters(chain[-1]) and not arithmetic.equal(side, chain[-1]):
                return Equation(None, side, last)
    return last if name is None else Equation(name, letter(name), last)


def _letters(value: Quotient) -> set[str]:
    """But for pi, which is a number."""
    return {name for part in (value.top, value.bottom) for _, powers in part for name, _ in powers} - {"\\pi"}
