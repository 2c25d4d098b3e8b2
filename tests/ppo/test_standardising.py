"""Over what advantages are standardised, and with which variance: as the configuration says. Numbers worked by hand."""

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


def test_what_does_not_count_and_what_is_equal_has_no_part_in_a_group() -> None:
    fault = answer("a", 9.0, 2, state=ScoreState.INFRASTRUCTURE_FAULT)
    tool = scored(3.0, of=response([7, 7, 7], to=prompt("b"), mask=[True, False, True]))
    batch = [answer("a", 1.0, 1), fault, answer("a", 0.0, 1), tool, answer("b", 3.0, 1), answer("c", 2.0, 1)]
    advantage = {"gae_lambda": 1.0, "standardise": "group"}
    found = made(batch, values=[0.0] * 15, advantage=advantage, responses_per_prompt=2).advantages
    torch.testing.assert_close(found, torch.tensor([1.0, 0, 0, -1.0, 0, 0, 0, 0, 0]), **CLOSE)
