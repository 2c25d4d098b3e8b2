"""Every setting of an advantage reaches its formula, by value, from scored responses to the experience of a step.

One batch for all: two prompts, responses of several lengths, a token that a tool wrote, an answer that was cut and one
that could not be scored. Settings differ from each other and from their defaults, so that two of them swapped, or one
left out, give other numbers. The formulas are written again with Python's floats, response by response.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean, pstdev, stdev
from typing import Any

import pytest
import torch

from proximo.algorithms.advantages import RunningMoments
from proximo.config.ppo.options import PPOConfig
from proximo.ppo.step import experience_of
from proximo.ppo.train_state import TrainState
from proximo.records import Experience, Finish, Passes, Scored, ScoreState
from records_made import prompt, response, scored

NATS = 0.375
"""What a nat of KL costs."""
GAMMA, LAM, VALUE_LAM = 0.9, 0.7, 0.8


@dataclass(frozen=True)
class Row:
    """A response that counts, with what its own tokens earn, and what the critic said before each of them."""

    group: str
    score: float
    answer: float
    nats: list[float]
    values: list[float]
    after: float
    is_cut: bool

    def rewards(self, score: float | None = None) -> list[float]:
        earned = [-NATS * each for each in self.nats]
        return [*earned[:-1], earned[-1] + (self.score if score is None else score)]

    @property
    def total(self) -> float:
        return sum(self.rewards())


Rows = list[Row]
Answers = list[list[float]]
"""For each row one number for each of its tokens."""


def batch() -> tuple[list[Scored], Passes, Rows]:
    draw = torch.Generator().manual_seed(7)
    records, rows, parts = [], [], []
    scores = {"a": (1.0, 3.5, -2.0, 0.75), "b": (5.0, 4.25, 99.0, 2.0)}
    sizes = {"a": (3, 2, 5, 1), "b": (2, 4, 3, 3)}
    for group, place in ((g, i) for i in range(4) for g in "ab"):
        size, is_fault, is_cut = sizes[group][place], scores[group][place] == 99.0, (group, place) == ("b", 1)
        old, reference = (-torch.rand(2, size, generator=draw, dtype=torch.float64)).unbind(0)
        values = torch.randn(size + 1, generator=draw, dtype=torch.float64)
        mask = [not (size == 5 and i in (1, 4)) for i in range(size)]
        of = response([7] * size, to=prompt(group), mask=mask, finish=Finish.LENGTH if is_cut else Finish.EOS)
        state = ScoreState.INFRASTRUCTURE_FAULT if is_fault else ScoreState.SCORED
        answer = 0.5 * place
        records.append(replace(scored(scores[group][place], of=of, state=state), answer_score=answer))
        parts.append((old, reference, values))
        own = [i for i in range(size) if mask[i]]
        if not is_fault:
            nats, before = [float((old - reference)[i]) for i in own], [float(values[i]) for i in own]
            rows.append(Row(group, scores[group][place], answer, nats, before, float(values[-1]), is_cut))
    old, reference, values = (torch.cat(each) for each in zip(*parts, strict=True))
    return records, Passes(old_logprobs=old, reference_logprobs=reference, values=values), rows


def made(advantage: dict[str, Any], **options: Any) -> Experience:
    records, passes, _ = batch()
    config = PPOConfig(advantage=advantage, responses_per_prompt=4, **options)
    if not config.uses_critic:
        passes = replace(passes, values=None)
    return experience_of(records, passes, TrainState(kl_coefficient=NATS), config=config)[0]


def to_go(rewards: list[float], gamma: float) -> list[float]:
    return [sum(gamma ** (s - t) * rewards[s] for s in range(t, len(rewards))) for t in range(len(rewards))]


def gae(row: Row, lam: float, *, rewards: list[float] | None = None, after: float = 0.0) -> list[float]:
    earned, following = rewards or row.rewards(), [*row.values[1:], after]
    deltas = [r + GAMMA * later - now for r, later, now in zip(earned, following, row.values, strict=True)]
    return to_go(deltas, GAMMA * lam)


def of_gae(rows: Rows) -> Answers:
    return [gae(row, LAM) for row in rows]


def of_returns(rows: Rows) -> Answers:
    return [to_go(row.rewards(), GAMMA) for row in rows]


def against_group(rows: Rows) -> Answers:
    starts = {g: fmean(to_go(row.rewards(), GAMMA)[0] for row in rows if row.group == g) for g in "ab"}
    return [[each - starts[row.group] for each in to_go(row.rewards(), GAMMA)] for row in rows]


def by_response(judge: Callable[[Row, Rows, Rows], float]) -> Callable[[Rows], Answers]:
    """From (row, its group, the others of its group) to one number for all of its tokens."""

    def answers(rows: Rows) -> Answers:
        found = []
        for row in rows:
            group = [each for each in rows if each.group == row.group]
            others = [each for each in group if each is not row]
            found.append([judge(row, group, others)] * len(row.nats))
        return found

    return answers


def best_of_three(row: Row, group: Rows, others: Rows) -> float:
    added = [max(row.total - max(one.total, two.total), 0) for one, two in combinations(others, 2)]
    return 3 * fmean(added)


def weighted(row: Row, group: Rows, others: Rows) -> float:
    return row.total - sum(len(r.nats) * r.total for r in group) / sum(len(r.nats) for r in group)


def standardised(answers: Answers, spread: Callable[..., float]) -> Answers:
    tokens = [x for each in answers for x in each]
    return [[(x - fmean(tokens)) / spread(tokens) for x in each] for each in answers]


def in_groups(rows: Rows, answers: Answers, spread: Callable[..., float]) -> Answers:
    tokens = {g: [x for row, each in zip(rows, answers, strict=True) if row.group == g for x in each] for g in "ab"}
    means, spreads = ({g: of(x) for g, x in tokens.items()} for of in (fmean, spread))
    return [
        [(x - means[row.group]) / spreads[row.group] for x in each] for row, each in zip(rows, answers, strict=True)
    ]


UNDECAYED = {"gamma": GAMMA, "standardise": False}
PLAIN = UNDECAYED | {"gae_lambda": LAM}
CASES: dict[str, tuple[dict[str, Any], Callable[[Rows], Answers]]] = {
    "gae": (PLAIN, of_gae),
    "a decay by length": (
        PLAIN | {"length_adaptive": 0.6},
        lambda rows: [gae(row, max(1 - 1 / (0.6 * len(row.nats)), 0)) for row in rows],
    ),
    "return_to_go": (UNDECAYED | {"kind": "return_to_go"}, of_returns),
    "group_return_to_go": (UNDECAYED | {"kind": "group_return_to_go"}, against_group),
    "greedy_baseline": (
        {"kind": "greedy_baseline", "gamma": GAMMA},
        lambda rows: [to_go(row.rewards(row.score - row.answer), GAMMA) for row in rows],
    ),
    "group_centred": (
        {"kind": "group_centred"},
        by_response(lambda row, group, others: row.total - fmean(r.total for r in group)),
    ),
    "leave_one_out": (
        {"kind": "leave_one_out"},
        by_response(lambda row, group, others: row.total - fmean(r.total for r in others)),
    ),
    "group_standardised": (
        {"kind": "group_standardised"},
        by_response(
            lambda row, group, others: (
                (row.total - fmean(r.total for r in group)) / (stdev(r.total for r in group) + 1e-4)
            )
        ),
    ),
    "length_weighted": ({"kind": "length_weighted"}, by_response(weighted)),
    "pass_at_k": ({"kind": "pass_at_k", "k": 3}, by_response(best_of_three)),
    "standardised by default": (
        {"kind": "return_to_go", "gamma": GAMMA},
        lambda rows: standardised(of_returns(rows), pstdev),
    ),
    "groups standardised by default": (
        {"kind": "group_return_to_go", "gamma": GAMMA},
        lambda rows: standardised(against_group(rows), pstdev),
    ),
    "standardised, unbiased": (
        {"gamma": GAMMA, "gae_lambda": LAM, "unbiased_variance": True},
        lambda rows: standardised(of_gae(rows), stdev),
    ),
    "standardised in groups": (
        PLAIN | {"standardise": "group"},
        lambda rows: in_groups(rows, of_gae(rows), pstdev),
    ),
    "returns standardised in groups": (
        {"kind": "return_to_go", "gamma": GAMMA, "standardise": "group"},
        lambda rows: in_groups(rows, of_returns(rows), pstdev),
    ),
    "standardised in groups, unbiased": (
        PLAIN | {"standardise": "group", "unbiased_variance": True},
        lambda rows: in_groups(rows, of_gae(rows), stdev),
    ),
}


def check(found: torch.Tensor, mask: torch.Tensor, wanted: Answers) -> None:
    assert found[mask].tolist() == pytest.approx([x for each in wanted for x in each], rel=1e-6, abs=1e-6)
    assert not found[~mask].any()


@pytest.mark.parametrize("name", CASES)
def test_advantages_are_the_formula_of_their_settings(name: str) -> None:
    options, formula = CASES[name]
    found = made(options)
    check(found.advantages, found.mask, formula(batch()[2]))


def test_returns_have_the_same_discount_and_the_decay_of_the_values() -> None:
    found, rows = made(PLAIN | {"value_gae_lambda": VALUE_LAM}), batch()[2]
    check(found.advantages, found.mask, of_gae(rows))
    assert found.returns is not None
    to_learn = [[a + v for a, v in zip(gae(row, VALUE_LAM), row.values, strict=True)] for row in rows]
    check(found.returns, found.mask, to_learn)


def test_a_cut_answer_has_the_discounted_value_after_it_in_the_place_of_its_score() -> None:
    found = made(PLAIN, truncation="bootstrap")
    wanted = [
        gae(row, LAM, rewards=row.rewards(0.0), after=row.after) if row.is_cut else gae(row, LAM) for row in batch()[2]
    ]
    check(found.advantages, found.mask, wanted)


@pytest.mark.parametrize(("unbiased", "spread"), [(False, pstdev), (True, stdev)])
@pytest.mark.parametrize("mode", ["zero_mean", "keep_mean"])
def test_whitened_rewards_are_what_the_estimator_adds_up(
    mode: str, unbiased: bool, spread: Callable[..., float]
) -> None:
    found, rows = made(PLAIN | {"unbiased_variance": unbiased}, score={"whiten_rewards": mode}), batch()[2]
    plain = [row.rewards() for row in rows]
    kept = fmean(x for each in plain for x in each) if mode == "keep_mean" else 0.0
    whitened = [[x + kept for x in each] for each in standardised(plain, spread)]
    check(found.rewards, found.mask, whitened)
    check(
        found.advantages,
        found.mask,
        [gae(row, LAM, rewards=rewards) for row, rewards in zip(rows, whitened, strict=True)],
    )


def test_whether_a_step_is_flat_is_judged_by_rewards_before_they_are_whitened() -> None:
    """Whitening gives any two returns, however close, a deviation of about 1."""
    near = [scored(score, of=response([7])) for score in (1.0, 1.001)]
    passes = Passes(old_logprobs=torch.full((2,), -1.0), values=torch.zeros(4))
    config = PPOConfig(score={"whiten_rewards": "zero_mean"}, kl="none")
    seen = RunningMoments(count=101, mean=1.0, squares=100.0)
    before = TrainState(kl_coefficient=0.0, return_moments=seen)
    found, *_ = experience_of(near, passes, before, config=config)
    assert found.rewards.abs().min() > 0.9
    assert found.is_flat
    assert not found.advantages.any()
    less = PPOConfig(advantage={"least_spread": 0.0004}, kl="none")
    assert not experience_of(near, passes, before, config=less)[0].is_flat


def test_groups_that_are_left_out_are_still_in_the_running_moments() -> None:
    batch = [
        scored(score, of=response([7], to=prompt(group))) for group, score in zip("aabb", (4, 4, 1, 3), strict=True)
    ]
    passes = Passes(old_logprobs=torch.full((4,), -1.0))
    advantage = {"kind": "group_centred", "zero_variance_groups": "exclude"}
    options = {"responses_per_prompt": 2, "kl": "none", "score": {"normalise": "standardise"}}
    config = PPOConfig(advantage=advantage, **options)
    found, _, shaped = experience_of(batch, passes, TrainState(kl_coefficient=0.0), config=config)
    assert found.mask.tolist() == [False, False, True, True]
    assert (shaped.moments.count, shaped.moments.mean) == (4, 3.0)
    assert found.advantages.tolist() == pytest.approx([0.0, 0.0, -1 / stdev([4, 4, 1, 3]), 1 / stdev([4, 4, 1, 3])])
