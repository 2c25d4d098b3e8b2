"""Over what advantages are standardised, and with which variance: as the configuration says. Numbers worked by hand."""

from statistics import fmean, pstdev, stdev

import pytest
import torch

from proximo.config.ppo.options import PPOConfig
from proximo.ppo.experience import make_experience
from proximo.records import Experience, Passes, Scored, ScoreState
from records_made import prompt, response, scored

CLOSE = {"rtol": 0, "atol": 1e-5}


def made(batch: list[Scored], *, values: list[float], reference: list[float] | None = None, **options) -> Experience:
    passes = Passes(
        old_logprobs=torch.cat([each.response.logprobs for each in batch]),
        reference_logprobs=None if reference is None else torch.tensor(reference),
        values=torch.tensor(values),
    )
    config = PPOConfig(**({"kl": {"kind": "none" if reference is None else "reward"}} | options))
    return make_experience(batch, passes, config=config, kl_coefficient=0.2)[0]


def answer(group: str, score: float, num_tokens: int, **fields) -> Scored:
    return scored(score, of=response([7] * num_tokens, to=prompt(group)), **fields)


@pytest.mark.parametrize(
    ("whiten", "advantages"),
    [
        ("none", [0.797594, 0.777279, 0.610216, -1.095016, -1.090073]),
        ("keep_mean", [0.727775, 0.780943, 0.680795, -1.093097, -1.096416]),
    ],
)
def test_with_the_unbiased_variance_the_numbers_are_those_of_trl(whiten: str, advantages: list[float]) -> None:
    batch = [
        scored(1.0, of=response(logprobs=[-1.0, -2.0, -0.5])),
        scored(-0.5, of=response([7, 2], logprobs=[-0.3, -0.7])),
    ]
    options = {
        "reference": [-1.2, -1.5, -0.9, -0.1, -1.7],
        "values": [0.1, 0.2, 0.3, 9.0, 0.5, 0.4, 9.0],
        "score": {"whiten_rewards": whiten},
    }
    found = made(batch, **options, advantage={"unbiased_variance": True})
    torch.testing.assert_close(found.advantages, torch.tensor(advantages), **CLOSE)
    assert (made(batch, **options).advantages - found.advantages).abs().max() > 0.05


SCORES = {"a": (1.0, 0.0), "b": (5.0, 4.0)}
LENGTHS = (1, 3)


@pytest.mark.parametrize("unbiased", [False, True])
def test_a_group_has_a_mean_and_a_deviation_of_its_own_over_its_tokens(unbiased: bool) -> None:
    """At values of 0, gamma and lambda of 1 every token of a response has its score as advantage."""
    batch = [answer(group, score, n) for group, pair in SCORES.items() for score, n in zip(pair, LENGTHS, strict=True)]
    batch = [batch[0], batch[2], batch[1], batch[3]]  # groups need not stand together
    options = {"gae_lambda": 1.0, "standardise": "group", "unbiased_variance": unbiased}
    found = made(batch, values=[0.0] * 12, advantage=options, responses_per_prompt=2)
    spread = stdev if unbiased else pstdev
    tokens = {group: [pair[0], *[pair[1]] * 3] for group, pair in SCORES.items()}
    wanted = {group: [(x - fmean(all_)) / spread(all_) for x in all_] for group, all_ in tokens.items()}
    assert wanted["a"] == pytest.approx(wanted["b"])
    expected = [wanted["a"][0], wanted["b"][0], *wanted["a"][1:], *wanted["b"][1:]]
    torch.testing.assert_close(found.advantages, torch.tensor(expected), **CLOSE)


def test_what_does_not_count_and_what_is_equal_has_no_part_in_a_group() -> None:
    fault = answer("a", 9.0, 2, state=ScoreState.INFRASTRUCTURE_FAULT)
    tool = scored(3.0, of=response([7, 7, 7], to=prompt("b"), mask=[True, False, True]))
    batch = [answer("a", 1.0, 1), fault, answer("a", 0.0, 1), tool, answer("b", 3.0, 1), answer("c", 2.0, 1)]
    advantage = {"gae_lambda": 1.0, "standardise": "group"}
    found = made(batch, values=[0.0] * 15, advantage=advantage, responses_per_prompt=2).advantages
    torch.testing.assert_close(found, torch.tensor([1.0, 0, 0, -1.0, 0, 0, 0, 0, 0]), **CLOSE)


def test_a_group_is_standardised_for_returns_to_go_as_for_a_critic() -> None:
    """AReaL's experiment without a critic."""
    batch = [answer("a", 1.0, 2), answer("a", 0.0, 2)]
    advantage = {"kind": "return_to_go", "standardise": "group"}
    found = made(batch, values=[0.0] * 6, advantage=advantage, responses_per_prompt=2).advantages
    torch.testing.assert_close(found, torch.tensor([1.0, 1.0, -1.0, -1.0]), **CLOSE)
