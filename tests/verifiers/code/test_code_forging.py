"""Programs that try to pass without a right answer. None may, and none may be taken for a failure of ours."""

import json

import pytest
from forged_programs import EQUAL, FORGED, FRAME, SQUARE, ZERO_TO_ALL

from graded_programs import graded
from proximo_verifiers.verifier import ScoreState


@pytest.mark.parametrize(("name", "program"), FORGED, ids=[case[0] for case in FORGED])
def test_a_forged_program_does_not_pass(sandbox, name, program) -> None:
    found = graded(sandbox, program, SQUARE, cpu_seconds=0.3)
    assert found.score == 0.0, name
    assert found.components["tests_passed"] == 0.0, found
    assert found.state in (ScoreState.SCORED, ScoreState.MODEL_FAULT), found


def test_a_thread_that_takes_what_is_asked_keeps_nobody_waiting_for_ever(sandbox) -> None:
    program = "import os, threading\nthreading.Thread(target=lambda: os.read(3, 99999), daemon=True).start()\n"
    found = graded(sandbox, program + "def f(x): return 0", SQUARE, cpu_seconds=0.1)
    assert found.score == 0.0
    assert found.state in (ScoreState.SCORED, ScoreState.MODEL_FAULT), found


TRUSTING = (
    "assert abs(f(3.5) - 0.5) < 1e-6", "assert abs(0.5 - f(3.5)) < 1e-6", "assert f(2) + 1 == 8", "assert 7 in f(7)",
    "assert 7 not in f(7) or 7 in f(7)", "assert f(2) % 5 == 0", "assert not f(2) / 5 - 1", "assert -f(1) == 0",
    "assert abs(f(1)) == 0", "assert f(1) ** 2 <= 0", "assert round(f(1)) == 0", "assert divmod(f(1), 2)",
    "assert f(1).issubset({1, 2})", "assert f(1).isdisjoint({1, 2})", "assert not f(1).difference([1]) or True",
    "assert f(1).symmetric_difference({1}) is True", "assert f(1) | {2}", "assert f(1) & 1", "assert {1} >= f(1)",
)  # fmt: skip


@pytest.mark.parametrize("test", TRUSTING)
def test_an_object_is_told_nothing_that_a_test_expects_and_answers_for_nothing(sandbox, test) -> None:
    """The second test is passed by whoever has been told the 9 of the first."""
    learnt = test.replace("0.5", "9").replace("1e-6", "0")
    found = graded(sandbox, ZERO_TO_ALL, {"test_list": [test, learnt, "assert f(0) == 9"]}, partial=True)
    assert (found.score, found.state) == (0.0, ScoreState.SCORED), found


MASKED = (
    ("an exception whose text cannot be made", "class A:\n def __str__(self): raise KeyError\n __repr__ = __str__\n"
     "def f(x): raise ValueError(A())", "assert f(1) == 1"),
    ("an exception whose text ends the process", "import os\nclass A:\n def __str__(self): os._exit(0)\n"
     " __repr__ = __str__\ndef f(x): raise ValueError(A())", "assert f(1) == 1"),
    ("an exception whose text interrupts", "class A:\n def __str__(self): raise KeyboardInterrupt\n"
     "def f(x): raise ImportError(A())", "assert f(1) == 1"),
    ("too deep to be given back", "def f(x):\n if x != 1: return 0\n for _ in range(99): x = [x]\n return x",
     "assert f(f(1)) == 2"),
    ("too large to be given back", "def f(x): return 'x' * (4 * 2 ** 20 - 60)", "assert f(f(1)) == 2"),
    ("too large together", "def f(x): return 'x' * 10 ** 6", "assert f([f(n) for n in range(5)]) == 2"),
    ("an argument made too deep",
     "def f(x):\n if x: return 0\n for _ in range(97): x[:] = [x[:]]\n return f",
     "xs = []\nf(xs)\nassert f([[xs]]) == 2"),
    ("a number that makes too much", "def f(x): return 10 ** 7", "assert f('x' * f(1)) == 2"),
    ("a greeting that is none", FRAME + "frame(['failed'])\ndef f(x): return 0", "assert f(1) == 2"),
    ("a greeting of lists", FRAME + "frame(['failed', [[]], {}])\ndef f(x): return 0", "assert f(1) == 2"),
    ("a limit of its own", "import resource, signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\ntry:\n"
     " resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nexcept (OSError, ValueError): pass\n"
     "def f(x):\n while True: pass", "assert f(1) == 2"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "program", "test"), MASKED, ids=[case[0] for case in MASKED])
def test_a_wrong_program_is_not_taken_for_a_failure_of_ours(sandbox, name, program, test) -> None:
    found = graded(sandbox, program, {"test_list": [test]}, cpu_seconds=2.0)
    assert found.score == 0.0, found
    assert found.state in (ScoreState.SCORED, ScoreState.MODEL_FAULT), name


RAISES = {"test_list": ["try:\n    f(-1)\nexcept Exception:\n    pass\nelse:\n    assert False"]}
HIDDEN = (
    ("it ends the process", "import os\ndef f(x): os._exit(0)"),
    ("it exits", "def f(x): exit(0)"),
    ("it answers with what is no message", "import os\ndef f(x): os.write(3, b'\\0\\0\\0\\2{}')"),
    ("it returns what does not cross", "def f(x): return 'x' * 10 ** 7"),
    ("it loops", "def f(x):\n while True: pass"),
)


@pytest.mark.parametrize(("name", "program"), HIDDEN, ids=[case[0] for case in HIDDEN])
def test_a_test_that_expects_any_exception_is_not_passed_by_ending_the_process(sandbox, name, program) -> None:
    assert graded(sandbox, "def f(x): raise ValueError", RAISES).score == 1.0
    assert graded(sandbox, program, RAISES, cpu_seconds=0.2).score == 0.0, name


SETS = {"test_list": ["assert set(f(1)) == set((1, 2))", "assert sorted(f(1)) == sorted([2, 1])"]}


def test_functions_of_python_that_the_tests_use_are_not_the_programs(sandbox) -> None:
    assert graded(sandbox, "def f(x): return (2, 1)", SETS).score == 1.0
    assert graded(sandbox, "set = sorted = lambda x: 0\ndef f(x): return (3,)", SETS).score == 0.0


ZERO = {
    "entry_point": "find_zero",
    "test": "METADATA = {}\ndef check(candidate):\n    assert abs(poly([-1, 2], candidate([-1, 2]))) < 1e-4\n",
}
POLY = "def poly(xs, x):\n    return xs[0] + xs[1] * x\n\ndef find_zero(xs):\n"


def test_functions_of_the_prompt_are_not_the_programs(sandbox) -> None:
    options = {"form": "check", "program": "completion", "prompt": POLY}
    assert graded(sandbox, "    return -xs[0] / xs[1]\n", ZERO, **options).score == 1.0
    documented = POLY + '    """A zero of xs."""\n'
    assert graded(sandbox, "    return -xs[0] / xs[1]\n", ZERO, **options | {"prompt": documented}).score == 1.0
    for forged in (
        "    return 5\n\ndef poly(xs, x): return 0\n",
        "    return 5\n\ndef check(candidate): return None\n",
        "    return 5\n\nabs = lambda x: 0\n",
        "    return 5\n\nimport builtins\nbuiltins.abs = lambda x: 0\n",
        "    return 5\n\nMETADATA = None\nfind_zero.__code__ = (lambda xs: 5).__code__\n",
    ):
        assert graded(sandbox, forged, ZERO, **options).score == 0.0, forged


CALLBACK = {"test_list": ["secret = 10\nassert f(lambda x: x) == secret"]}
ASKED = """
def f(g):
    frame(["ask", 0, "get", "__globals__", ["t", ["t"], ["t"]]])
    said = os.read(3, int.from_bytes(os.read(3, 4), "big")).decode()
    return int(said.split('"secret",')[1].split(",")[0].strip("]")) if '"secret",' in said else 0
"""


def test_of_a_function_that_it_is_given_the_program_learns_what_calling_it_says(sandbox) -> None:
    assert graded(sandbox, "def f(g): return g(10)", CALLBACK).score == 1.0
    assert graded(sandbox, FRAME + ASKED, CALLBACK).score == 0.0
    peeking = "def f(g):\n    try: return g.__globals__['secret']\n    except AttributeError: return g(3)"
    assert graded(sandbox, peeking, CALLBACK).score == 0.0


PRINTED = (
    ("nothing", ""),
    ("all numbers", "for n in range(100): print(n)"),
    ("an answer for each", "print('3 7 11')"),
    ("success", "print('OK')\nprint('ACCEPTED')\nimport os\nos._exit(0)"),
    (
        "the expected one, from somewhere",
        "import os, sys\nprint(sys.argv, os.environ, os.listdir('.'), sys.stdin.read())",
    ),
    ("it writes everywhere", "import os\nfor n in range(64):\n try: os.write(n, b'3\\n')\n except OSError: pass"),
)


@pytest.mark.parametrize(("name", "program"), PRINTED, ids=[case[0] for case in PRINTED])
def test_outputs_cannot_be_guessed_or_found(sandbox, name, program) -> None:
    row = {"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7\n", "11\n"]}
    found = graded(sandbox, program, row, form="stdio")
    assert found.score == 0.0, name
    assert found.state in (ScoreState.SCORED, ScoreState.MODEL_FAULT)


RETURNED = (
    ("always equal", EQUAL.replace("BASE", "int") + "def f(x): return E(0)"),
    ("a list of all", "def f(x): return list(range(30))"),
    ("results of its own", FRAME + "for _ in range(3): frame(['value', [], True])\nimport os\nos._exit(0)"),
    ("that it is ready, twice", FRAME + "for _ in range(9): frame(['ready'])\ndef f(x): return 0"),
    ("no message", "import os\nos.write(3, b'\\xff\\xff\\xff\\xff')\ndef f(x): return 0"),
    ("too much", "import os\ndef f(x):\n for _ in range(300): os.write(3, bytes(2 ** 16))"),
    ("the verifier's modules",
     "import json\njson.loads = lambda x: [[0]] * 9\njson.dumps = lambda *a, **k: '10'\ndef f(x): return 0"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "program"), RETURNED, ids=[case[0] for case in RETURNED])
def test_returned_values_cannot_be_guessed_or_found(sandbox, name, program) -> None:
    facts = {"fn_name": "f", "inputs": [[3], [4], [5]], "outputs": [10, 17, 26]}
    found = graded(sandbox, program, {"input_output": json.dumps(facts)}, form="input_output")
    assert found.score == 0.0, name
    assert found.components["tests_passed"] == 0.0
    assert found.state in (ScoreState.SCORED, ScoreState.MODEL_FAULT)


DOUBLED = """
tree = ["l"]
for number in reversed(range(16)):
    tree = ["l", tree, ["r", number + 1]]
frame(["ready"])
"""
"""A list of two that are one, and so on: its text would be twice as long with each."""


@pytest.mark.parametrize("message", ['["other", [], tree]', '["refused", [], tree]', '["raised", [], ["t", tree, 1]]'])
def test_what_is_no_result_is_not_written_out(sandbox, message) -> None:
    row = {"input_output": {"fn_name": "f", "inputs": [[1]], "outputs": [1]}}
    found = graded(sandbox, f"{FRAME}{DOUBLED}frame({message})\nos._exit(0)", row, form="input_output")
    assert (found.score, found.reason) == (0.0, "test 1 of 1 failed: the program broke the protocol")


def test_a_message_may_be_no_longer_than_that_of_tests_that_are_run(sandbox) -> None:
    program = """
import os
for text in (b'["ready"]', b'["value", [], 10' + b" " * 2 ** 22 + b"]"):
    text = len(text).to_bytes(4, "big") + text
    while text:
        text = text[os.write(3, text):]
os._exit(0)
"""
    assert graded(sandbox, program, {"test_list": ["assert f(3) == 10"]}).score == 0.0
