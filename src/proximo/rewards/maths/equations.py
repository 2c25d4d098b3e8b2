"""What chains of sides are worth: of `2 + 3 = 5` its value, of `1 < x < 5` an interval. Every side is looked at."""

from collections.abc import Sequence

from proximo.rewards.maths.answer_types import Equation, Infinity, Several, Union, Value
from proximo.rewards.maths.rational_functions import Arithmetic, Quotient, RefusedError, UnreadableError, letter

RELATIONS = ("<", ">", "\\le", "\\ge")


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


def between(sides: Sequence[Value], relations: Sequence[str]) -> Equation:
    """`x > 5`, `5 < x` and `1 < x \\le 5`: the letter with its interval. Raises UnreadableError for all else."""
    if all(relation in (">", "\\ge") for relation in relations):
        sides, relations = sides[::-1], ["<" if relation == ">" else "\\le" for relation in reversed(relations)]
    if not all(relation in ("<", "\\le") for relation in relations):
        raise UnreadableError("relations that point both ways")
    names = [_name(side) for side in sides]
    if len(sides) == 2:
        below = names[1] is not None
        sides = [*sides, Infinity(1)] if below else [Infinity(-1), *sides]
        names = [*names, None] if below else [None, *names]
        relations = [*relations, "<"] if below else ["<", *relations]
    lowest, _, highest = sides if len(sides) == 3 else (None, None, None)
    name = names[1] if len(names) == 3 else None
    if lowest is None or highest is None or name is None or not (_is_bound(lowest) and _is_bound(highest)):
        raise UnreadableError("an inequality that is not of one letter and its bounds")
    brackets = "(" if relations[0] == "<" else "[", ")" if relations[1] == "<" else "]"
    return Equation(name, letter(name), Several(brackets[0], (lowest, highest), brackets[1], True))


def joined(parts: Sequence[Value]) -> Value:
    """The union of intervals or sets; that of inequalities in one letter is one of their intervals."""
    if not all(isinstance(part, Equation) for part in parts):
        return Union(tuple(parts))
    names = {part.name for part in parts if isinstance(part, Equation)}
    name = names.pop()
    if names or name is None:
        raise UnreadableError("a union of equations")
    return Equation(name, letter(name), Union(tuple(part.right for part in parts if isinstance(part, Equation))))


def _name(side: Value) -> str | None:
    """The letter that a side is, where it is nothing else."""
    names = _letters(side) if isinstance(side, Quotient) else set()
    return next((name for name in names if len(names) == 1 and side == letter(name)), None)


def _is_bound(side: Value) -> bool:
    return isinstance(side, Infinity) or (isinstance(side, Quotient) and not _letters(side))


def _letters(value: Quotient) -> set[str]:
    """But for pi, which is a number."""
    return {name for part in (value.top, value.bottom) for _, powers in part for name, _ in powers} - {"\\pi"}
