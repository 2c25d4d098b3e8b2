"""benchmarks/corrections.py in small: engines say the log-probs of what they sample, and without weights PPO drifts."""

from collections import Counter

import corrections
import pytest
from corrections import Case

SHIFTED = Case(task="dislikes", engine="shifted", advantage="return_to_go")


@pytest.mark.parametrize("task", ["dislikes", "fragile"])
def test_a_shifted_engine_says_the_log_probs_of_the_distribution_that_it_samples_from(task: str) -> None:
    made = corrections.trainer(Case(task=task, engine="shifted", advantage="return_to_go"), seed=0)
    responses = made.generate(["a"] * 1000)
    drawn = Counter(response.token_ids[0] for response in responses)
    said = {response.token_ids[0]: response.logprobs[0].exp().item() for response in responses}
    for token, probability in said.items():
        deviation = (probability * (1 - probability) / len(responses)) ** 0.5
        assert drawn[token] / len(responses) == pytest.approx(probability, abs=4 * deviation)
    own = made.roles.policy.logprobs(responses).exp()
    assert abs(own[0].item() - said[responses[0].token_ids[0]]) > 0.01, "the learner's is another one"


def test_a_policy_learns_the_token_that_costs_from_an_engine_that_prefers_it_unless_draws_are_weighted() -> None:
    """The closed form: tests/algorithms/test_behaviour.py."""
    weighted = Case(task="dislikes", engine="shifted", advantage="return_to_go", correction="token, truncated")
    start, *_, drifted = corrections.curve(SHIFTED, seed=0, num_steps=10)
    *_, right = corrections.curve(weighted, seed=0, num_steps=10)
    assert start["bad"] == pytest.approx(0.1, abs=0.05)
    assert drifted["bad"] > 0.3
    assert right["bad"] < 0.1
    assert right["score"] > drifted["score"] + 0.05
