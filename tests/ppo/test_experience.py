"""Scores become rewards, rewards advantages; what does not count, counts nowhere. Numbers worked by hand."""

import math
from dataclasses import replace

import pytest
import torch

from proximo.config.ppo.advantage import Advantage
from proximo.config.ppo.options import PPOConfig
from proximo.config.schema.fields import kinds_of, sections_of
from proximo.ppo.experience import make_experience, token_values
from proximo.records import Experience, Finish, Passes, Scored, ScoreState
from records_made import prompt, response, scored

CLOSE = {"rtol": 0, "atol": 1e-6}


def build(
    batch: list[Scored],
    *,
    reference: list[float] | None = None,
    values: list[float] | None = None,
    full_kl: list[float] | None = None,
    kl_coefficient: float = 0.1,
    advantage: dict | None = None,
    **options,
) -> Experience:
    old = torch.cat([s.response.logprobs for s in batch])
    passes = Passes(
        old_logprobs=old,
        reference_logprobs=None if reference is None else torch.tensor(reference),
        values=None if values is None else torch.tensor(values),
        full_kl=None if full_kl is None else torch.tensor(full_kl),
    )
    estimator = {"standardise": False} | (advantage or {})
    if estimator["standardise"] is None:  # by default
        del estimator["standardise"]
    config = PPOConfig(**({"advantage": estimator, "kl": "none"} | options))
    return make_experience(batch, passes, config=config, kl_coefficient=kl_coefficient)[0]


def test_the_score_sits_once_on_the_last_token_and_the_kl_on_every_token() -> None:
    batch = [scored(2.0, of=response(logprobs=[-1.0, -2.0, -3.0]))]
    made = build(batch, reference=[-1.5, -2.0, -2.0], values=[0.0] * 4, kl={"kind": "reward"})
    torch.testing.assert_close(made.rewards, torch.tensor([-0.05, 0.0, 2.1]), **CLOSE)


@pytest.mark.parametrize(
    ("measure", "penalty"), [("k1", -0.5), ("k2", 0.125), ("abs", 0.5), ("k3", 0.148721), ("full", 0.7)]
)
def test_each_measure_of_the_kl_enters_the_reward(measure: str, penalty: float) -> None:
    """Of a token that the reference likes better, where no two of them are equal."""
    batch = [scored(0.0, of=response([2], logprobs=[-1.0]))]
    kl = {"kind": "reward", "estimator": measure}
    made = build(batch, reference=[-0.5], values=[0.0, 0.0], full_kl=[0.7], kl=kl, kl_coefficient=1.0)
    torch.testing.assert_close(made.rewards, torch.tensor([-penalty]), **CLOSE)


def test_gae_with_gamma_and_lambda_one_gives_the_score_minus_the_value() -> None:
    made = build([scored(1.0)], values=[0.2, 0.3, 0.4, 9.0], advantage={"gae_lambda": 1.0})
    torch.testing.assert_close(made.advantages, torch.tensor([0.8, 0.7, 0.6]), **CLOSE)
    torch.testing.assert_close(made.returns, torch.tensor([1.0, 1.0, 1.0]), **CLOSE)
    torch.testing.assert_close(token_values(made), torch.tensor([0.2, 0.3, 0.4]))


def test_the_value_after_the_last_token_counts_only_where_a_cut_response_bootstraps() -> None:
    cut = scored(1.0, of=response(finish=Finish.LENGTH))
    zero = build([cut], values=[0.0, 0.0, 0.0, 0.5], advantage={"gae_lambda": 1.0})
    bootstrap = build(
        [cut],
        values=[0.0, 0.0, 0.0, 0.5],
        advantage={"gae_lambda": 1.0},
        truncation="bootstrap",
    )
    ended = build(
        [scored(1.0)],
        values=[0.0, 0.0, 0.0, 0.5],
        advantage={"gae_lambda": 1.0},
        truncation="bootstrap",
    )
    assert zero.advantages.tolist() == [1.0, 1.0, 1.0]
    assert bootstrap.advantages.tolist() == [0.5, 0.5, 0.5]
    assert ended.advantages.tolist() == [1.0, 1.0, 1.0]


def test_a_cut_response_can_be_left_out_and_then_counts_nowhere() -> None:
    batch = [scored(1.0), scored(50.0, of=response(finish=Finish.LENGTH)), scored(3.0)]
    made = build(batch, values=[0.0] * 12, truncation="mask", advantage={"standardise": True, "gae_lambda": 1.0})
    assert made.mask.tolist() == [True] * 3 + [False] * 3 + [True] * 3
    assert made.advantages[3:6].tolist() == [0.0] * 3
    assert made.advantages[made.mask].mean().abs() < 1e-6
    torch.testing.assert_close(made.advantages[:3], torch.full((3,), -1.0), rtol=0, atol=1e-4)


def test_advantages_and_returns_may_have_a_lambda_each() -> None:
    """Rewards 0, 0, 1; values 0.2, 0.3, 0.4: the deltas are 0.1, 0.1 and 0.6."""
    made = build([scored(1.0)], values=[0.2, 0.3, 0.4, 9.0], advantage={"gae_lambda": 0.5, "value_gae_lambda": 1.0})
    torch.testing.assert_close(made.advantages, torch.tensor([0.1 + 0.05 + 0.15, 0.1 + 0.3, 0.6]), **CLOSE)
    torch.testing.assert_close(made.returns, torch.tensor([1.0, 1.0, 1.0]), **CLOSE)


def test_a_lambda_may_adapt_to_the_tokens_that_the_policy_wrote() -> None:
    """alpha 2 / 3: of three tokens 1 - 1 / 2, of two of them, with one by a tool between, 1 - 3 / 4."""
    tool = scored(1.0, of=response(mask=[True, False, True]))
    values = [0.2, 0.3, 0.4, 9.0]
    options = {"length_adaptive": 2 / 3, "value_gae_lambda": 1.0, "least_spread": None}
    made = build([scored(1.0), tool], values=values * 2, advantage=options)
    wanted = torch.tensor([0.1 + 0.05 + 0.15, 0.1 + 0.3, 0.6, 0.2 + 0.25 * 0.6, 0.0, 0.6])
    torch.testing.assert_close(made.advantages, wanted, **CLOSE)
    torch.testing.assert_close(made.returns[:3], torch.tensor([1.0, 1.0, 1.0]), **CLOSE)


def test_without_a_lambda_of_its_own_the_return_is_the_advantage_plus_the_value() -> None:
    made = build([scored(1.0)], values=[0.2, 0.3, 0.4, 9.0], advantage={"length_adaptive": 2 / 3})
    torch.testing.assert_close(made.returns, made.advantages + torch.tensor([0.2, 0.3, 0.4]), **CLOSE)


def to_go(estimator: str, **options) -> Experience:
    """Two prompts with two responses of one and two tokens; the KL costs 0.5 on each first token."""
    asked = [prompt(name) for name in ("a", "a", "b", "b")]
    ids = [[2], [7, 2], [2], [7, 2]]
    batch = [
        scored(score, of=response(tokens, to=each, logprobs=[-1.0, -1.0][: len(tokens)]))
        for score, tokens, each in zip((1.0, 3.0, 5.0, 5.0), ids, asked, strict=True)
    ]
    advantage = {"kind": estimator, **options}
    reference = [-2.0, -2.0, -1.0, -2.0, -2.0, -1.0]
    kl = {"kind": "reward"}
    return build(batch, reference=reference, advantage=advantage, responses_per_prompt=2, kl=kl, kl_coefficient=0.5)


def test_a_return_to_go_is_the_score_minus_the_kl_that_is_still_to_come() -> None:
    torch.testing.assert_close(to_go("return_to_go").advantages, torch.tensor([0.5, 2.5, 3.0, 4.5, 4.5, 5.0]), **CLOSE)
    discounted = to_go("return_to_go", gamma=0.5).advantages
    torch.testing.assert_close(discounted, torch.tensor([0.5, 1.0, 3.0, 4.5, 2.0, 5.0]), **CLOSE)


def test_a_return_to_go_may_be_compared_with_the_mean_of_its_group() -> None:
    found = to_go("group_return_to_go").advantages
    torch.testing.assert_close(found, torch.tensor([-1.0, 1.0, 1.5, 0.0, 0.0, 0.5]), **CLOSE)


@pytest.mark.parametrize("estimator", ["return_to_go", "group_return_to_go"])
def test_returns_to_go_are_standardised_over_the_batch_unless_told_otherwise(estimator: str) -> None:
    found = to_go(estimator, standardise=None).advantages
    assert found.mean().abs() < 1e-6
    assert found.square().mean() == pytest.approx(1.0, abs=1e-5)


def test_leave_one_out_compares_a_response_with_the_others_alone() -> None:
    torch.testing.assert_close(
        to_go("leave_one_out").advantages, torch.tensor([-2.0, 2.0, 2.0, 0.0, 0.0, 0.0]), **CLOSE
    )


def test_the_length_weighted_baseline_counts_the_tokens_of_each_response() -> None:
    """Returns 0.5 of one token and 2.5 of two: a baseline of 5.5 / 3."""
    found = to_go("length_weighted").advantages
    torch.testing.assert_close(found, torch.tensor([-4 / 3, 2 / 3, 2 / 3, 0.0, 0.0, 0.0]), **CLOSE)


def test_of_pass_at_k_only_what_adds_to_the_best_of_k_counts() -> None:
    torch.testing.assert_close(
        to_go("pass_at_k", k=2).advantages, torch.tensor([0.0, 4.0, 4.0, 0.0, 0.0, 0.0]), **CLOSE
    )
    three = [scored(score, of=response([2])) for score in (1.0, 2.0, 4.0)]
    for k, wanted in ((2, [0.0, 1.0, 5.0]), (3, [0.0, 0.0, 6.0])):
        options = {"advantage": {"kind": "pass_at_k", "k": k}, "responses_per_prompt": 3}
        torch.testing.assert_close(build(three, **options).advantages, torch.tensor(wanted), **CLOSE)


def test_a_clamped_kl_costs_no_more_than_its_limit_on_a_token() -> None:
    batch = [scored(2.0, of=response(logprobs=[-1.0, -2.0, -3.0]))]
    reference = [-9.0, -2.25, -2.0]
    made = build(batch, reference=reference, values=[0.0] * 4, kl={"kind": "reward", "clamp": 0.5}, kl_coefficient=2.0)
    torch.testing.assert_close(made.rewards, torch.tensor([-1.0, -0.5, 3.0]), **CLOSE)


def test_one_response_per_prompt_is_enough_where_the_batch_is_the_baseline() -> None:
    made = build([scored(1.0), scored(3.0)], advantage={"kind": "return_to_go", "standardise": None})
    torch.testing.assert_close(made.advantages, torch.tensor([-1.0] * 3 + [1.0] * 3), rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="gae, return_to_go and greedy_baseline need only one"):
        PPOConfig(advantage="leave_one_out")


@pytest.mark.parametrize("advantage", [kind for section in sections_of(Advantage) for kind in kinds_of(section)])
def test_a_fault_of_the_infrastructure_changes_nothing_for_the_others(advantage: str) -> None:
    good = [replace(scored(score), answer_score=0.5) for score in (1.0, 3.0)]
    faulty = scored(math.nan, state=ScoreState.INFRASTRUCTURE_FAULT)
    standardise = advantage != "pass_at_k"
    options = {
        "advantage": {"kind": advantage, "standardise": standardise},
        "responses_per_prompt": 2,
    }
    values = [0.1] * 8 if advantage == "gae" else None
    alone = build(good, values=values, **options)
    with_fault = build([*good, faulty], values=None if values is None else [*values, *[math.nan] * 4], **options)
    torch.testing.assert_close(with_fault.advantages[:6], alone.advantages)
    assert with_fault.advantages[6:].tolist() == [0.0] * 3
    assert not with_fault.mask[6:].any()


def test_tokens_that_a_tool_wrote_carry_no_reward_and_are_skipped() -> None:
    made = build(
        [scored(1.0, of=response(mask=[True, False, True]))], values=[0.0, 7.0, 0.0, 0.0], advantage={"gae_lambda": 0.5}
    )
    assert made.rewards.tolist() == [0.0, 0.0, 1.0]
    torch.testing.assert_close(made.advantages, torch.tensor([0.5, 0.0, 1.0]), **CLOSE)


def test_groups_are_the_responses_to_one_prompt_and_the_kl_belongs_to_the_return() -> None:
    first, second = prompt("a"), prompt("b")
    batch = [scored(s, of=response([2], to=p, logprobs=[-1.0])) for p, s in [(first, 1.0), (first, 3.0), (second, 5.0)]]
    made = build(
        batch,
        reference=[-1.0, -3.0, -1.0],
        advantage={"kind": "group_centred"},
        responses_per_prompt=2,
        kl={"kind": "reward"},
        kl_coefficient=0.5,
    )
    torch.testing.assert_close(made.advantages, torch.tensor([-0.5, 0.5, 0.0]), **CLOSE)


def test_within_a_group_advantages_are_in_its_deviations_where_the_recipe_says_so() -> None:
    """Its unbiased deviation is 0.57735."""
    batch = [scored(score, of=response([2], to=prompt("a"))) for score in (1.0, 0.0, 0.0, 1.0)]
    made = build(batch, advantage={"kind": "group_standardised"}, responses_per_prompt=4)
    torch.testing.assert_close(made.advantages, torch.tensor([1.0, -1.0, -1.0, 1.0]) * 0.865875, **CLOSE)


def test_an_empty_response_has_no_token_to_learn_from() -> None:
    made = build([scored(1.0, of=response([])), scored(2.0)], values=[0.0] * 5)
    assert made.lengths == (0, 3)
    assert made.rewards.tolist() == [0.0, 0.0, 2.0]


def test_scores_are_clipped_and_cut_responses_can_go_without_one() -> None:
    batch = [scored(9.0), scored(-9.0), scored(9.0, of=response(finish=Finish.LENGTH))]
    made = build(batch, values=[0.0] * 12, score={"clip": 2.0}, truncation="unscored")
    assert made.rewards[[2, 5, 8]].tolist() == [2.0, -2.0, 0.0]
