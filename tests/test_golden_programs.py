"""Golden numbers of the programs that this one unites, for what is not a formula alone: heads, endings, averages.

Those of formulas are in algorithms/test_golden_vectors.py, of the split in data/test_data_split.py.
"""

import pytest
import torch
from torch import nn

from builders import tiny_tokenizer
from proximo.learner.averaging import follow
from proximo.models.heads import OutputHead, token_logprobs
from proximo.records import Finish
from proximo.rollout.sampling import SamplingOptions
from proximo.rollout.stopping import StopRules

LOGITS = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]])
SAME = OutputHead(weight=torch.eye(3))
"""Hidden states are the logits."""


@pytest.mark.parametrize(("temperature", "wanted"), [(1.0, [-0.407606, -1.551445]), (0.5, [-0.142932, -2.239545])])
def test_log_probs_at_a_temperature(temperature: float, wanted: list[float]) -> None:
    """torchtune's vector."""
    found = token_logprobs(LOGITS, SAME, torch.tensor([2, 0]), temperature=temperature)
    assert found.logprobs.tolist() == pytest.approx(wanted, abs=1e-5)


def test_entropy() -> None:
    """TRL's vector."""
    found = token_logprobs(LOGITS[:1], SAME, torch.tensor([0]), entropy=True)
    assert found.entropy is not None
    assert found.entropy.item() == pytest.approx(0.832396, abs=1e-5)


@pytest.mark.parametrize(
    ("written", "num_tokens", "finish"),
    [
        ([5, 6, 2], 3, Finish.STOP),
        ([5, 2, 7], 2, Finish.STOP),
        ([5, 6, 7], 3, Finish.LENGTH),
        ([2, 3, 4], 1, Finish.STOP),
    ],
)
def test_a_stop_token_ends_a_response_and_stays(written: list[int], num_tokens: int, finish: Finish) -> None:
    """torchtune's rows, which are written in full there and cut afterwards: its last indices are [2, 1, 2, 0]."""
    options = SamplingOptions(max_new_tokens=3, stop_token_ids=(2,))
    rules = StopRules(options=options, eos_token_ids=(), tokenizer=tiny_tokenizer())
    ends = [rules.finish(written[:length], limit=3) for length in range(1, 4)]
    first = next(index for index, end in enumerate(ends) if end is not None)
    assert (first + 1, ends[first]) == (num_tokens, finish)


def test_a_step_of_the_moving_average() -> None:
    """DeepSpeed-Chat's: from 1 towards 0 with decay 0.992."""
    average, policy = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    nn.init.ones_(average.weight)
    nn.init.zeros_(policy.weight)
    follow(average, policy, decay=0.992)
    assert average.weight.item() == pytest.approx(0.992)
