"""Which program an answer gives."""

import time

import pytest

from proximo_verifiers.code.extraction import fenced_blocks, program_of

PROMPT = 'import math\n\n\ndef helper(x):\n    return x + 1\n\n\ndef area(r):\n    """The area."""\n'

LAST = (
    ("a block in Python", "Here:\n```python\nx = 1\n```\n", "x = 1"),
    ("a block with the short name", "```py\nx = 1\n```", "x = 1"),
    ("a block with the version", "```python3\nx = 1\n```", "x = 1"),
    ("a block in capitals", "```Python\nx = 1\n```", "x = 1"),
    ("a block without a language", "```\nx = 1\n```", "x = 1"),
    ("a block of tildes", "~~~python\nx = 1\n~~~", "x = 1"),
    ("a space before the language", "``` python\nx = 1\n```", "x = 1"),
    ("a language in braces", "```{python}\nx = 1\n```", "x = 1"),
    ("a language in braces with a point", "```{.python}\nx = 1\n```", "x = 1"),
    ("spaces after the fence", "```python   \nx = 1\n```  ", "x = 1"),
    ("windows line ends", "```python\r\nx = 1\r\ny = 2\r\n```\r\n", "x = 1\ny = 2"),
    ("the last of two", "```python\nx = 1\n```\nBetter:\n```python\nx = 2\n```", "x = 2"),
    ("python before what follows it", "```python\nx = 1\n```\nIt prints\n```\n42\n```", "x = 1"),
    ("python before a shell", "```python\nx = 1\n```\n```bash\npip install x\n```", "x = 1"),
    ("no language before another", "```\nx = 1\n```\n```bash\nls\n```", "x = 1"),
    ("another language where nothing else is", "```text\nx = 1\n```", "x = 1"),
    ("an empty block is none", "```python\nx = 1\n```\n```python\n\n```", "x = 1"),
    ("an answer that was cut", "```python\nx = 1\ny =", "x = 1\ny ="),
    ("a cut block after a whole one", "```python\nx = 1\n```\n```python\nx = 2", "x = 2"),
    ("an indented fence", "1. So:\n   ```python\n   def f():\n       return 1\n   ```", "def f():\n    return 1"),
    ("an indented fence around less", "   ```python\nx = 1\n   ```", "x = 1"),
    ("words before the fence", "The answer is ```python\nx = 1\n```", "x = 1"),
    ("the end on the last line", "```python\nx = 1```", "x = 1"),
    ("longer fences around shorter ones", '````python\ns = """\n```\n"""\n````', 's = """\n```\n"""'),
    ("tildes do not end backticks", "```python\nx = 1\n~~~\n```", "x = 1\n~~~"),
    ("backticks in a text of the program", "```python\ns = '```'\nx = 1\n```", "s = '```'\nx = 1"),
    ("a block that the next one ends", "```python\nx = 1\n```python\nx = 2\n```", "x = 2"),
    ("inline code is no block", "Use `x = 1` or ```x``` here", None),
    ("no block", "x = 1", None),
    ("nothing", "", None),
    ("white space", " \n\t\n", None),
    ("an empty block", "```python\n```", None),
    ("a fence alone", "```python", None),
    ("a lone surrogate", "```python\ns = '\ud800'\n```", "s = '?'"),
    ("empty lines are kept", "```python\n\nx = 1\n\n\ny = 2\n```", "\nx = 1\n\n\ny = 2"),
    ("tabs are kept", "```python\nif x:\n\ty = 1\n```", "if x:\n\ty = 1"),
    ("a fence of four that three do not end", "````\nx = 1\n```\ny = 2\n````", "x = 1\n```\ny = 2"),
    ("thoughts before", "<think>```python\nx = 0\n```</think>\n```python\nx = 1\n```", "x = 1"),
)


@pytest.mark.parametrize(("name", "text", "program"), LAST, ids=[case[0] for case in LAST])
def test_the_program_is_the_last_block_that_says_python(name: str, text: str, program: str | None) -> None:
    assert program_of(text, "last_block", allow_unfenced=False) == program


OTHERS = (
    ("first", "first_block", "```python\nx = 1\n```\n```python\nx = 2\n```", "x = 1"),
    ("first in python", "first_block", "```\nout\n```\n```python\nx = 2\n```", "x = 2"),
    ("joined", "all_blocks", "```python\nx = 1\n```\nand\n```python\ny = 2\n```", "x = 1\n\ny = 2"),
    ("joined without the shell", "all_blocks", "```sh\nls\n```\n```python\ny = 2\n```", "y = 2"),
    ("the whole text", "response", "x = 1\n```python\ny = 2\n```", "x = 1\n```python\ny = 2\n```"),
    ("the whole text, empty", "response", "  \n", None),
    ("a body", "completion", "    return math.pi * r * r\n", f"{PROMPT}    return math.pi * r * r\n"),
    ("a body in a block", "completion", "```python\n    return 3 * r\n```", f"{PROMPT}    return 3 * r"),
    (
        "the function anew",
        "completion",
        "```python\ndef area(r):\n    return 3 * r * r\n```",
        "import math\n\n\ndef helper(x):\n    return x + 1\n\n\n\ndef area(r):\n    return 3 * r * r",
    ),
    (
        "the function anew, without a block",
        "completion",
        "def area(r):\n    return helper(r)\n",
        "import math\n\n\ndef helper(x):\n    return x + 1\n\n\n\ndef area(r):\n    return helper(r)\n",
    ),
    (
        "another function",
        "completion",
        "    return g(r)\n\ndef g(r): return r",
        f"{PROMPT}    return g(r)\n\ndef g(r): return r",
    ),
    ("a longer name", "completion", "    def area2(r): pass", f"{PROMPT}    def area2(r): pass"),
)


@pytest.mark.parametrize(("name", "which", "text", "program"), OTHERS, ids=[case[0] for case in OTHERS])
def test_another_part_of_the_answer_by_choice(name: str, which, text: str, program: str | None) -> None:
    assert program_of(text, which, allow_unfenced=False, prompt=PROMPT, function="area") == program


def test_an_answer_without_a_block_is_the_program_where_that_is_asked_for() -> None:
    assert program_of("x = 1\n", "last_block", allow_unfenced=True) == "x = 1\n"
    assert program_of("so\n```\nx = 1\n```", "last_block", allow_unfenced=True) == "x = 1"


def test_an_open_block_says_so() -> None:
    assert [block.closed for block in fenced_blocks("```\na\n```\n```\nb")] == [True, False]


@pytest.mark.parametrize(
    "text", ["`" * 200_000, "```\n" * 50_000, "``` " * 50_000, "~`" * 100_000, " " * 200_000 + "```"]
)
def test_a_hostile_text_takes_no_time(text: str) -> None:
    start = time.process_time()
    for which in ("last_block", "all_blocks", "completion"):
        program_of(text, which, allow_unfenced=True, prompt=PROMPT, function="area")
    assert time.process_time() - start < 2.0
