"""The sampler of CUDA, in Triton's interpreter on a CPU: it draws what torch's operators draw."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from proximo.rollout import sampling
from proximo.rollout.sampling import SamplingOptions, sample

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: make test does on Linux")
PROGRAM = """
import sys, warnings, torch
from proximo.rollout import sampling
from proximo_cuda import sampling as fused_sampling

def plain(logits, **given):
    raise RuntimeError("no compiler")

cases = torch.load(sys.argv[1])
drawn = [fused_sampling.draw(**given) for given in cases]
found = {"drawn": drawn, "said": []}
for definition in (sampling.plain_draw, lambda logits, **given: plain(logits), lambda logits, **given: (
    sampling.plain_draw(logits, **given)[0].roll(1), sampling.plain_draw(logits, **given)[1]
)):
    fused_sampling._AGREED.clear()
    with warnings.catch_warnings(record=True) as caught:
        answers = [fused_sampling.draws_as(definition, torch.device("cpu"), torch.float32, 500) for _ in range(2)]
    found["said"].append((answers, [text for each in caught if "fused" in (text := str(each.message))]))
torch.save(found, sys.argv[1])
"""


def rows(num_rows: int, num_tokens: int, dtype: torch.dtype = torch.float32, temperature: float = 1.0) -> dict:
    generator = torch.Generator().manual_seed(num_tokens)
    return {
        "logits": torch.randn(num_rows, num_tokens, generator=generator).mul(3).to(dtype),
        "streams": torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator),
        "positions": torch.randint(0, 100_000, (num_rows,), generator=generator),
        "temperature": temperature,
    }


def rows_with_gaps() -> dict:
    """Every second column of a wider matrix, tokens of probability 0, and a row with NaN."""
    given = rows(4, 600)
    logits = given["logits"][:, ::2]
    logits[:, 7:] = -torch.inf
    logits[0, 3] = torch.nan
    return given | {"logits": logits}


CASES = [
    *(
        rows(3, num_tokens, dtype, temperature)
        for num_tokens in (1, 257, 5000)
        for dtype in (torch.float32, torch.bfloat16)
        for temperature in (1.0, 0.7)
    ),
    rows(30, 300) | {"logits": torch.zeros(30, 300)},  # the token with the least noise wins: every bit shows
    rows_with_gaps(),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the kernel drew, in a process of its own: Triton chooses its interpreter when it is imported."""
    file = tmp_path_factory.mktemp("drawn") / "cases.pt"
    torch.save(CASES, file)
    paths = [str(Path(sampling.__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", PROGRAM, file]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return torch.load(file)


def test_tokens_are_equal_and_log_probs_to_rounding(found: dict) -> None:
    for given, (tokens, logprobs) in zip(CASES[:-1], found["drawn"][:-1], strict=True):
        expected, theirs = sampling.plain_draw(**given)
        assert tokens.equal(expected)
        torch.testing.assert_close(logprobs, theirs, rtol=1e-6, atol=1e-6)


def test_rows_that_lie_apart_and_tokens_of_probability_0(found: dict) -> None:
    tokens, logprobs = found["drawn"][-1]
    expected, theirs = sampling.plain_draw(**CASES[-1])
    assert tokens[1:].equal(expected[1:])
    torch.testing.assert_close(logprobs[1:], theirs[1:], rtol=1e-6, atol=1e-6)
    assert tokens[1:].max() < 7
    assert not logprobs[0].isfinite()


def test_it_is_used_where_it_draws_the_same_tokens_and_nowhere_else(found: dict) -> None:
    (right, silent), (broken, error), (others, difference) = found["said"]
    assert (right, silent) == ([True, True], [])
    assert broken == others == [False, False]
    assert error == ["the fused sampler is not used on cpu: RuntimeError: no compiler"]  # said once
    assert difference == ["the fused sampler is not used on cpu: it draws other tokens than torch's operators"]


def test_only_draws_from_the_full_softmax_go_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Noted:
        def sample(self, logits: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
            calls.append(given["temperature"])
            return sampling.plain_draw(logits, **given)

    monkeypatch.setattr(sampling, "row_operations", lambda _: Noted())
    given = rows(2, 50)
    del given["temperature"]
    endings = torch.zeros(0, dtype=torch.long)
    for options in ({"temperature": 0.5}, {"top_k": 3}, {"greedy": True}, {"top_p": 0.5}):
        sample(**given, options=SamplingOptions(max_new_tokens=1, **options), ending_ids=endings)
    assert calls == [0.5]
