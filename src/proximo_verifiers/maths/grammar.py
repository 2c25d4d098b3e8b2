"""A recursive descent parser that turns the tokens of an answer into a value. No text is evaluated as code.

answer   = item { "," item }
item     = [ name "=" ] union { "=" union } [ "\\approx" union ]
union    = range { \\cup range }
range    = sum { ( "<" | ">" | \\le | \\ge ) sum }
sum      = [ sign ] product { sign product }
product  = power { [ "*" | "/" ] power }
power    = primary [ "^" exponent ] { "!" } [ "%" ]
primary  = number | letter | "(" answer ")" | \\frac | \\sqrt | \\binom | matrix | set | interval

The comma of (1,000) separates two items where it may, and thousands in arithmetic alone, as in 2(1,000).
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import comb, factorial
from typing import TypeVar

from proximo_verifiers.maths.answer_types import (
    RELATIONS,
    Infinity,
    Matrix,
    Several,
    Value,
    chain_value,
    inequality_interval,
    repeating,
    union_of,
    whole_number,
)
from proximo_verifiers.maths.lexer import Token
from proximo_verifiers.maths.rational_functions import (
    Arithmetic,
    NotEvaluatedError,
    RationalFunction,
    UnreadableError,
    letter,
    rational,
)

MAX_FACTORIAL = 200
LETTERS = (
    "pi alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu xi rho sigma tau phi "
    "varphi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega ell"
)
_LETTERS = frozenset(f"\\{name}" for name in LETTERS.split())
_FACTORS = _LETTERS | {"\\frac", "\\sqrt", "\\binom"}
MAX_NESTING = 30
"""Largest nesting of brackets, arguments and exponents."""
_END = Token("end", "", False)
_OPENINGS, _CLOSINGS = frozenset(("(", "[", "{", "\\{")), frozenset((")", "]", "}", "\\}"))


Parsed = TypeVar("Parsed")


class Parser:
    """Parses the tokens of one answer. `sign` is 1 or -1 for \\pm, and `percent` is the factor that % stands for.

    With `has_sets` the braces of {1,234} are those of a set, else they may be LaTeX's, which nobody sees.
    """

    def __init__(
        self, tokens: Sequence[Token], *, sign: int, percent: Fraction, has_sets: bool, arithmetic: Arithmetic
    ) -> None:
        self._tokens = tokens
        self._has_sets = has_sets
        self._several: set[tuple[int, int]] = set()
        """(start, end) of brackets that hold several items if their commas separate no thousands."""
        self._position = self._depth = 0
        self._arguments = 0
        """How many arguments and exponents are open: what is in them is a number."""
        self._sign = sign
        self._percent = percent
        self._arithmetic = arithmetic

    def answer(self) -> Value:
        """The value of the answer. Raises UnreadableError outside the grammar, NotEvaluatedError if it is too large."""
        items = self._items()
        if self._next is not _END:
            raise UnreadableError(f"unexpected {self._next.text!r}")
        return items[0] if len(items) == 1 else Several("", items, "")

    @property
    def _next(self) -> Token:
        return self._ahead(0)

    def _ahead(self, count: int) -> Token:
        index = self._position + count
        return self._tokens[index] if index < len(self._tokens) else _END

    def _take(self) -> Token:
        token = self._next
        self._position += 1
        return token

    def _accept(self, *texts: str) -> bool:
        if self._next.kind in ("mark", "command") and self._next.text in texts:
            self._position += 1
            return True
        return False

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise UnreadableError(f"{text!r} is missing")

    def _items(self) -> tuple[Value, ...]:
        items = [self._item()]
        while self._accept(",", ";"):
            items.append(self._item())
        return tuple(items)

    def _item(self) -> Value:
        name = self._name()
        self._accept("\\approx")
        sides = [self._union()]
        while self._accept("="):
            sides.append(self._union())
        if self._accept("\\approx"):
            self._union()  # parsed and dropped: the value before it is exact
        return chain_value(name, sides, self._arithmetic)

    def _name(self) -> str | None:
        """Consumes `x =`, `f(x) =`, `(x, y) =` or `x \\in` before a value, and returns the name; None if there is
        none."""
        start = self._position
        if self._accept("("):
            letters = [self._take()]
            while self._accept(","):
                letters.append(self._take())
            named = len(letters) > 1 and all(token.kind == "letter" for token in letters)
            if named and self._accept(")") and self._accept("="):
                return f"({','.join(token.text for token in letters)})"
        elif self._next.kind == "letter":
            name = self._take().text
            self._accept("'")
            if self._accept("("):
                while self._next.kind == "letter" or self._next.text == ",":
                    self._take()
                self._accept(")")
            if self._accept("=", "\\approx", "\\in"):
                return name
        self._position = start
        return None

    def _union(self) -> Value:
        parts = [self._range()]
        while self._accept("\\cup"):
            parts.append(self._range())
        return parts[0] if len(parts) == 1 else union_of(parts)

    def _range(self) -> Value:
        sides, relations = [self._side()], []
        while self._next.text in RELATIONS:
            relations.append(self._take().text)
            sides.append(self._side())
        return inequality_interval(sides, relations) if relations else sides[0]

    def _side(self) -> Value:
        start = self._position
        value = self._sum()
        if (start, self._position) in self._several and not self._arguments:
            raise UnreadableError("several items in brackets, whose commas separate no thousands")
        return value

    def _sum(self) -> Value:
        first: Value = rational(0)
        if self._next.text not in ("+", "-", "\\pm"):
            first = self._product()
        elif self._ahead(1).text == "\\infty":
            return self._infinity()
        while (text := self._next.text) in ("+", "-", "\\pm"):
            self._take()
            term = self._number(self._product())
            negative = text == "-" or (text == "\\pm" and self._sign < 0)
            term = self._arithmetic.negate(term) if negative else term
            first = self._arithmetic.add(self._number(first), term)
        return first

    def _infinity(self) -> Infinity:
        sign = -1 if self._next.text == "-" else 1
        if self._next.text != "\\infty":
            self._take()
        self._take()
        return Infinity(sign)

    def _product(self) -> Value:
        if self._next.text == "\\infty":
            return self._infinity()
        value = self._power()
        while True:
            operation = self._operation()
            if operation is None:
                return value
            value = operation(self._number(value), self._number(self._power()))

    def _operation(self) -> Callable[[RationalFunction, RationalFunction], RationalFunction] | None:
        """The operation that joins the next factor, explicit or by juxtaposition; None if there is no next factor."""
        if self._accept("*"):
            return self._arithmetic.multiply
        if self._accept("/"):
            return self._arithmetic.divide
        token = self._next
        juxtaposed = token.kind == "letter" or token.text in ("(", "{")
        if juxtaposed or (token.kind == "command" and token.text in _FACTORS):
            return self._arithmetic.multiply
        return None

    def _power(self) -> Value:
        value = self._within(self._primary)
        if self._accept("^"):
            value = self._arithmetic.power(self._number(value), self._argument_of(self._exponent))
        while self._accept("!"):
            value = rational(factorial(whole_number(self._number(value), MAX_FACTORIAL)))
        if self._accept("%"):
            value = self._arithmetic.multiply(self._number(value), rational(self._percent))
        return value

    def _exponent(self) -> RationalFunction:
        if self._accept("-"):
            return self._arithmetic.negate(self._number(self._power()))
        return self._number(self._power())

    def _within(self, parse: Callable[[], Parsed]) -> Parsed:
        """Runs a recursive rule and bounds the depth of the recursion."""
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise NotEvaluatedError(f"more than {MAX_NESTING} nested levels")
        parsed = parse()
        self._depth -= 1
        return parsed

    def _primary(self) -> Value:
        token = self._take()
        match token.kind, token.text:
            case (("number" | "repeating"), _):
                return self._number_or_mixed(token)
            case "letter", "i":
                return self._arithmetic.root(rational(-1), 2)
            case "letter", name:
                return letter(name)
            case "mark", ("(" | "["):
                return self._bracketed(token.text)
            case "mark", "{":
                return self._braces()
            case "command", name:
                return self._command(name)
        raise UnreadableError(f"unexpected {token.text!r}")

    def _command(self, name: str) -> Value:
        if name in _LETTERS:
            return letter(name)
        if name.startswith("\\begin"):
            return self._matrix(name.replace("\\begin", "\\end"))
        rule = {"\\frac": self._fraction, "\\binom": self._binomial, "\\sqrt": self._root, "\\{": self._set}.get(name)
        if rule is None:
            raise UnreadableError(f"the command {name}")
        return rule()

    def _fraction(self) -> RationalFunction:
        return self._arithmetic.divide(self._argument(), self._argument())

    def _binomial(self) -> RationalFunction:
        above, below = (whole_number(self._argument(), MAX_FACTORIAL) for _ in range(2))
        return rational(comb(above, below))

    def _set(self) -> Several:
        start = self._position - 1
        items = () if self._next.text == "\\}" else self._items()
        self._expect("\\}")
        self._note_commas(start, items)
        return Several("{", items, "}")

    def _braces(self) -> Value:
        start = self._position - 1
        items = self._items()
        self._expect("}")
        if self._has_sets:
            self._note_commas(start, items)
        return items[0] if len(items) == 1 else Several("{", items, "}")

    def _root(self) -> RationalFunction:
        degree = 2
        if self._accept("["):
            degree = whole_number(self._number(self._sum()), 8)
            self._expect("]")
        return self._arithmetic.root(self._argument_of(self._primary), degree)

    def _argument(self) -> RationalFunction:
        """The argument of a command: in braces, or one token. Of a bare number LaTeX takes the first digit only."""
        token = self._next
        if token.kind == "number" and len(token.text) > 1 and token.text.isdecimal():
            rest = Token("number", token.text[1:], False)
            self._tokens = [*self._tokens[: self._position], rest, *self._tokens[self._position + 1 :]]
            return rational(int(token.text[0]))
        if token.kind == "number":
            return rational(Fraction(self._take().text))
        return self._argument_of(self._primary)

    def _argument_of(self, parse: Callable[[], Value]) -> RationalFunction:
        self._arguments += 1
        value = self._number(self._within(parse))
        self._arguments -= 1
        return value

    def _number_or_mixed(self, token: Token) -> RationalFunction:
        """A number, or a mixed number: an integer followed by a fraction of integers, such as `1 1/2`."""
        if token.kind == "repeating":
            return rational(repeating(token.text))
        value = Fraction(token.text)
        fraction = self._mixed_fraction() if token.text.isdecimal() else None
        return rational(value if fraction is None else value + fraction)

    def _mixed_fraction(self) -> Fraction | None:
        """The fraction of `1 1/2` or `1\\frac{1}{2}`. None for `2\\frac{x}{3}`, which is a product."""
        first, slash, second = self._next, self._ahead(1), self._ahead(2)
        plain = first.kind == second.kind == "number" and slash.text == "/" and first.spaced
        if plain and first.text.isdecimal() and second.text.isdecimal() and int(second.text):
            self._position += 3
            return Fraction(int(first.text), int(second.text))
        if first.text != "\\frac":
            return None
        start, tokens = self._position, self._tokens
        value = self._number(self._within(self._primary)).constant()
        written = "".join(token.text for token in self._tokens[start + 1 : self._position])
        if value is not None and not set(written) - set("0123456789{}"):
            return value
        self._position, self._tokens = start, tokens
        return None

    def _bracketed(self, opening: str) -> Value:
        start = self._position - 1
        items = self._items()
        closing = self._take().text
        if closing not in (")", "]"):
            raise UnreadableError("a bracket that is not closed")
        self._note_commas(start, items)
        if len(items) == 1:
            return items[0]
        return Several(opening, items, closing)

    def _note_commas(self, start: int, items: Sequence[Value]) -> None:
        """Note a bracket with one item that has a number with commas, outside all brackets and arguments in it."""
        depth = 0
        for token in self._tokens[start + 1 : self._position - 1] if len(items) == 1 else ():
            depth += (token.text in _OPENINGS) - (token.text in _CLOSINGS)
            if token.has_commas and depth == 0:
                self._several.add((start, self._position))

    def _matrix(self, end: str) -> Matrix:
        rows = [[self._item()]]
        while not self._accept(end):
            if self._accept("&"):
                rows[-1].append(self._item())
            elif self._accept("\\cr"):
                if self._next.text != end:
                    rows.append([self._item()])
            else:
                raise UnreadableError("a matrix that is not closed")
        return Matrix(tuple(map(tuple, rows)))

    def _number(self, value: Value) -> RationalFunction:
        if isinstance(value, Infinity):
            raise NotEvaluatedError("arithmetic with infinity")
        if not isinstance(value, RationalFunction):
            raise UnreadableError("arithmetic with something that is not a number")
        return value
