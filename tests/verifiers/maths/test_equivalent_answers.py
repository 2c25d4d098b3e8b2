"""The exact grammar: which answers are the same, which differ, and where it does not know."""

import random
from fractions import Fraction

import pytest
from answer_pairs import DIFFERENT, REFUSED, SAME, UNSURE

from proximo_verifiers.maths.equivalence import equivalent
from proximo_verifiers.maths.rational_functions import MAX_BITS, Arithmetic, NotEvaluatedError, letter, rational

ROUNDS = 300


def test_the_tables_are_as_long_as_they_are_meant_to_be() -> None:
    assert len(SAME) >= 90
    assert len(DIFFERENT) >= 60


@pytest.mark.parametrize(("reference", "answer"), SAME)
def test_an_answer_written_in_another_way_is_the_same(reference: str, answer: str) -> None:
    assert equivalent(reference, answer) is True


@pytest.mark.parametrize(("reference", "answer"), DIFFERENT)
def test_an_answer_that_differs_is_known_to_differ(reference: str, answer: str) -> None:
    assert equivalent(reference, answer) is False


@pytest.mark.parametrize(("reference", "answer"), UNSURE)
def test_what_the_grammar_cannot_read_is_neither_right_nor_wrong(reference: str, answer: str) -> None:
    assert equivalent(reference, answer) is None


@pytest.mark.parametrize(("reference", "answer"), REFUSED)
def test_what_is_undefined_or_too_large_is_refused(reference: str, answer: str) -> None:
    with pytest.raises(NotEvaluatedError):
        equivalent(reference, answer)


def ways(value: Fraction, draw: random.Random) -> list[str]:
    """Ways of writing one rational number."""
    n, d = value.numerator, value.denominator
    factor = draw.randrange(2, 50)
    sign, size = ("-" if n < 0 else ""), abs(n)
    found = [
        f"{n}/{d}",
        f"\\frac{{{n}}}{{{d}}}",
        f"{sign}\\dfrac{{{size * factor}}}{{{d * factor}}}",
        f"{sign}{size} \\div {d}",
        f"\\left({n}\\right) \\cdot {d}^{{-1}}",
        f"{n + d}/{d} - 1",
        f"x = \\frac{{{n}}}{{{d}}}",
        f"${n}/{d}$",
        f"\\frac{{{n * 100}}}{{{d}}}\\%",
    ]
    if size > d > 1:
        found.append(f"{sign}{size // d}\\frac{{{size % d}}}{{{d}}}")
        found.append(f"{sign}{size // d} {size % d}/{d}")
    if d == 1:
        found += [f"{n:,}", f"{n}.000", f"{n:,}".replace(",", "{,}"), f"{n} cm"]
    return found


def test_random_rationals_are_the_same_in_every_way_of_writing_and_differ_from_their_neighbours() -> None:
    draw = random.Random(0)
    for _ in range(ROUNDS):
        largest = draw.choice([9, 1000, 10**9, 10**30])
        value = Fraction(draw.randrange(-largest, largest + 1), draw.choice([1, 1, draw.randrange(1, largest + 1)]))
        one, other = draw.choice(ways(value, draw)), draw.choice(ways(value, draw))
        assert equivalent(one, other) is True, (one, other)
        neighbour = value + draw.choice([-1, 1]) * Fraction(1, draw.randrange(101, 200))
        wrong = draw.choice(ways(neighbour, draw)[:8])
        assert equivalent(one.replace("\\%", ""), wrong) is False, (one, wrong)


def test_random_polynomials_are_the_same_multiplied_out_and_differ_by_a_term() -> None:
    draw = random.Random(1)
    for _ in range(ROUNDS // 3):
        a, b, c, d = (draw.choice([-1, 1]) * draw.randrange(1, 30) for _ in range(4))
        factored = f"({a}x + {b}\\sqrt{{2}})({c}y + {d}\\pi)".replace("+ -", "- ")
        terms = [f"{a * c}xy", f"{a * d}x\\pi", f"{b * c}\\sqrt2 y", f"{b * d}\\sqrt{{2}}\\pi"]
        draw.shuffle(terms)
        assert equivalent(factored, " + ".join(terms).replace("+ -", "- ")) is True
        assert equivalent(factored, " + ".join(terms[:3]).replace("+ -", "- ")) is False


def test_roots_are_those_of_the_definition() -> None:
    arithmetic = Arithmetic(work=10**7)
    for whole in [*range(-60, 200), 2**31, 999_999_999_989, 10**12, 12**20]:
        root = arithmetic.root(rational(whole), 2)
        assert arithmetic.equal(arithmetic.multiply(root, root), rational(whole)), whole
    for cube in range(-9, 10):
        root = arithmetic.root(rational(cube**3), 3)
        assert root.constant() == cube


def test_squares_come_out_of_a_root() -> None:
    arithmetic = Arithmetic(work=10**7)
    for outside in range(1, 25):
        for inside in (1, 2, 3, 5, 6, 7, 10, 15, 30, 101, -1, -6):
            root = arithmetic.root(rational(outside**2 * inside), 2)
            assert root == arithmetic.multiply(rational(outside), arithmetic.root(rational(inside), 2)), (
                outside,
                inside,
            )


def test_square_roots_of_different_square_free_numbers_are_independent() -> None:
    """Sums of roots agree with their decimals: equal where and only where the real numbers are."""
    draw = random.Random(2)
    for _ in range(ROUNDS):
        numbers = [[draw.choice([2, 3, 5, 6, 8, 12, 18, 20, 24, 27]) for _ in range(3)] for _ in range(2)]
        texts = [" + ".join(f"\\sqrt{{{n}}}" for n in row) for row in numbers]
        same = abs(sum(n**0.5 for n in numbers[0]) - sum(n**0.5 for n in numbers[1])) < 1e-9
        assert equivalent(*texts) is same, texts


def test_a_tolerance_is_a_part_of_the_reference_and_off_by_default() -> None:
    assert equivalent("\\pi", "3.14") is False
    assert equivalent("\\pi", "3.14", relative_tolerance=1e-3) is True
    assert equivalent("\\pi", "3.13", relative_tolerance=1e-3) is False
    assert equivalent("100\\sqrt{2}", "141.4", relative_tolerance=1e-3) is True
    assert equivalent("(1, \\frac13)", "(1, 0.3333)", relative_tolerance=1e-3) is True
    assert equivalent("0", "0.001", relative_tolerance=1e-1) is False
    assert equivalent("x", "1.001x", relative_tolerance=1e-1) is False


def test_no_number_is_built_before_its_size_is_known() -> None:
    arithmetic = Arithmetic()
    just = arithmetic.power(rational(2), rational(MAX_BITS // 2 - 1)).constant()
    assert just == 2 ** (MAX_BITS // 2 - 1)
    for base, exponent in ((rational(2), 10**10), (rational(Fraction(1, 3)), 10**10), (letter("x"), 10**10)):
        with pytest.raises(NotEvaluatedError):
            arithmetic.power(base, rational(exponent))
    with pytest.raises(NotEvaluatedError):
        equivalent("5", "2^{2^{20}}")


def test_the_same_question_has_the_same_answer() -> None:
    first = [equivalent(*pair) for pair in (*SAME, *DIFFERENT)]
    assert first == [equivalent(*pair) for pair in (*SAME, *DIFFERENT)]
