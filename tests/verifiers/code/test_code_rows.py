"""Rows that no program could pass are found before there is any answer; and packages that programs may import."""

from functools import partial

import pytest

from graded_programs import graded, open_sandbox
from proximo_verifiers.code import test_runner
from proximo_verifiers.code.test_runner import PRELOAD
from proximo_verifiers.code.verifier import CodeVerifier
from proximo_verifiers.errors import DataError, SandboxError
from proximo_verifiers.sandbox.jobs import Limits
from proximo_verifiers.sandbox.runner import Sandbox

FOREIGN = {
    "Decimal": ("from decimal import Decimal\n", "assert f(1) == Decimal('1.5')", "Decimal('1.5')"),
    "Fraction": ("from fractions import Fraction\n", "half = Fraction(1, 2)\nassert half == f(2)", "Fraction(1, 2)"),
    "date": ("import datetime\n", "assert not f(1) != f(2) == datetime.date(2020, 1, 1)", "datetime.date(2020, 1, 1)"),
    "Point": ("class Point:\n    pass\n", "assert f(1) in (Point(),)", "Point()"),
    "deque": ("from collections import deque\n", "assert f([1]) == [deque([1])]", "[deque([1])]"),
}
"""What tests and program begin with, a test, and what a right program returns."""
FINE = (
    "assert f(1) == 2 and f(2) != 'a' and [3] == f(3)",
    "assert abs(f(1) - 0.5) < 1e-6",
    "from decimal import Decimal\nassert str(f(1)) == str(Decimal('1.5'))",
    "from collections import Counter, OrderedDict\nassert f(1) == Counter('aa') and f(2) == OrderedDict(a=1)",
    "from decimal import Decimal\nassert f(Decimal(1).is_zero()) == [g(x) for x in range(3)]",
    "class Point:\n    def __init__(self): self.x = 1\n    def __eq__(self, other): return self.x == other.x\n"
    "assert Point() == f(1)",
    "import datetime\nassert f(1) != datetime.date(2020, 1, 1)",
    "try:\n    import nowhere\nexcept ImportError:\n    pass\nassert f(1) == 2",
    "assert f(1) == Node(2)",
    "assert 1 / 0 == f(1)",
    "while f(1) != 1: pass\nassert f(2) is None or f(3)",
)


def check(sandbox: Sandbox, row: dict, **options) -> None:
    CodeVerifier(runner=sandbox, **{"form": "asserts"} | options).check_row(None, row)


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_row_whose_tests_compare_with_what_cannot_cross_is_refused(sandbox, kind) -> None:
    before, test, value = FOREIGN[kind]
    row = {"test_list": ["assert f(1) or True", before + test]}
    with pytest.raises(
        DataError, match=f"test 2 compares the result of the program with a {kind}, which is not a plain"
    ):
        check(sandbox, row)
    assert graded(sandbox, f"{before}def f(x): return {value}", row).reason.startswith("test 2 of 2 failed: an object")


@pytest.mark.parametrize("test", FINE, ids=range(len(FINE)))
def test_what_a_program_might_pass_is_left_isolated(sandbox, test, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_runner, "Limits", partial(Limits, cpu_seconds=1.0))  # one test has no end
    check(sandbox, {"test_list": [test]})


@pytest.mark.parametrize(
    ("row", "where"),
    [
        ({"test_list": ["assert f(1)", "import nowhere\nassert f(1) == 2"]}, "test 2"),
        ({"test_list": ["assert f(1)"], "test_setup_code": "from nowhere.deep import x"}, "the set-up of the tests"),
        ({"test_list": ["assert f(1) == 2"], "code_before": "import nowhere"}, "the code before the program"),
    ],
)
def test_a_row_that_imports_what_is_not_there_is_refused(sandbox, row, where) -> None:
    with pytest.raises(DataError, match=f"{where} imports nowhere, which the sandbox lacks: add .* to packages"):
        check(sandbox, row)


def test_programs_and_tests_import_the_packages_that_are_named() -> None:
    open_sandbox().close()
    row = {"test_list": ["import numpy\nassert numpy.allclose(f(2), [0, 1])", "assert f(3)[1] == 1 and g() == 1.5"]}
    program = "import numpy\ndef f(n): return numpy.arange(n)\ndef g(): return numpy.float32(1.5)"
    verifier = CodeVerifier(form="asserts", program="response", packages=["numpy"])
    try:
        verifier.check_row(None, row)
        assert graded(verifier._runner, program, row).score == 1.0
        compared = {"test_list": ["assert g() == 1.5"]}
        assert graded(verifier._runner, program, compared).score == 1.0
    finally:
        verifier.close()
    with Sandbox(preload=PRELOAD) as bare, pytest.raises(DataError, match="test 1 imports numpy"):
        check(bare, row)
    with pytest.raises(SandboxError, match="'nmpy'; did you mean 'numpy'"):
        CodeVerifier(form="asserts", packages=["nmpy"])
