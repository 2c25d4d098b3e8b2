"""Every setting of a loss reaches its formula, by value: the trainer's loss beside one that is written out again.

Two updates worth of made-up numbers go through the calls that train, with settings that all differ from each other and
from their defaults, so that two of them swapped, or one left out, give another number. The formulas are written with
Python's floats, one token at a time.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from ppo.test_updates import Gathered, config, make, models
from proximo.algorithms.masking import segment_sum
from proximo.ppo.step import Roles
from proximo.records import Experience
from roles_made import state

COEFFICIENT = 0.37
"""Of the KL."""


@dataclass(frozen=True)
class Token:
    """What a loss reads of one token, and of its response."""

    now: float
    old: float
    sampled: float
    reference: float
    advantage: float
    whole: Sequence["Token"] = ()

    @property
    def ratio(self) -> float:
        return math.exp(self.now - self.old)

    @property
    def weight(self) -> float:
        return math.exp(self.old - self.sampled)


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def clipped(ratio: float, advantage: float, low: float, high: float, dual: float = math.inf) -> float:
    loss = max(-ratio * advantage, -min(max(ratio, 1 - low), 1 + high) * advantage)
    return min(loss, dual * abs(advantage)) if advantage < 0 else loss


def gmpo(token: Token, low: float, high: float) -> float:
    logs = [math.log(each.ratio) for each in token.whole]
    if token.advantage > 0:
        logs = [min(x, math.log(1 + high)) for x in logs]
    else:
        logs = [max(x, math.log(1 - low)) for x in logs]
    return -math.exp(mean(logs)) * token.advantage


def sapo(token: Token, positive: float, negative: float) -> float:
    tau = positive if token.advantage > 0 else negative
    return -4 / tau / (1 + math.exp(-tau * (token.ratio - 1))) * token.advantage


def product(token: Token) -> float:
    return math.prod(each.weight for each in token.whole)


def geometric_mean(token: Token) -> float:
    return product(token) ** (1 / len(token.whole))


def cut(weight: float, low: float, high: float) -> float:
    return min(max(weight, low), high)


def kept(weight: float, low: float, high: float) -> float:
    return weight if low <= weight <= high else 0.0


def plain(token: Token) -> float:
    return clipped(token.ratio, token.advantage, 0.2, 0.2)


def k3(token: Token) -> float:
    return math.exp(token.reference - token.now) - 1 + token.now - token.reference


BOUNDS = {"clip_low": 0.15, "clip_high": 0.35}
KL = {"kind": "loss", "estimator": "k2", "coefficient": 0.5}
OBJECTIVES: dict[str, tuple[Any, Callable[[Token], float]]] = {
    "ppo": (BOUNDS | {"dual_clip": 1.6}, lambda t: clipped(t.ratio, t.advantage, 0.15, 0.35, 1.6)),
    "gspo": (
        BOUNDS | {"kind": "gspo"},
        lambda t: clipped(math.exp(mean([math.log(x.ratio) for x in t.whole])), t.advantage, 0.15, 0.35),
    ),
    "gmpo": (BOUNDS | {"kind": "gmpo"}, lambda t: gmpo(t, 0.15, 0.35)),
    "gmpo's default clips": ("gmpo", lambda t: gmpo(t, 1 - math.exp(-0.4), math.exp(0.4) - 1)),
    "cispo": (BOUNDS | {"kind": "cispo"}, lambda t: -min(max(t.ratio, 0.85), 1.35) * t.advantage * t.now),
    "sapo": ({"kind": "sapo", "gate_positive": 0.7, "gate_negative": 2.5}, lambda t: sapo(t, 0.7, 2.5)),
}
UNBOUNDED = {"kind": "truncated", "cap": None}
WEIGHTS: dict[str, tuple[dict[str, Any], Callable[[Token], float]]] = {
    "truncated": ({"kind": "truncated", "cap": 1.3, "floor": 0.8}, lambda t: cut(t.weight, 0.8, 1.3)),
    "masked": ({"kind": "masked", "cap": 1.3, "floor": 0.8}, lambda t: kept(t.weight, 0.8, 1.3)),
    "truncated, of responses": (
        {"kind": "truncated", "of": "response", "cap": 1.9, "floor": 0.55},
        lambda t: cut(product(t), 0.55, 1.9),
    ),
    "masked, of responses": (
        {"kind": "masked", "of": "response", "cap": 1.9, "floor": 0.55},
        lambda t: kept(product(t), 0.55, 1.9),
    ),
    "geometric means": (
        {"kind": "truncated", "of": "geometric_mean", "cap": 1.1, "floor": 0.95},
        lambda t: cut(geometric_mean(t), 0.95, 1.1),
    ),
    "AReaL's mask of sequences": (
        {"kind": "masked", "of": "geometric_mean", "cap": 1.1, "floor": 0.95},
        lambda t: kept(geometric_mean(t), 0.95, 1.1),
    ),
    "without a cap": (UNBOUNDED, lambda t: t.weight),
}
ALL = {"denominator": "all"}
K3 = {"kind": "divergence", "estimator": "k3_reverse", "over": "mean", "limit": 0.04}
MASKS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Token], float]]] = {
    "OpenRLHF's seq-mask-tis": (
        UNBOUNDED,
        {"kind": "ratio", "lower": 0.95, "upper": 1.1},
        lambda t: (0.95 <= geometric_mean(t) <= 1.1) * t.weight,
    ),
    "AReaL's mask of sequences by the product": (
        UNBOUNDED | {"of": "geometric_mean"},
        {"kind": "ratio", "over": "product", "lower": 0.7, "upper": 1.4},
        lambda t: (0.7 <= product(t) <= 1.4) * geometric_mean(t),
    ),
    "AReaL's mask of sequences by kl_k3": (
        UNBOUNDED,
        K3,
        lambda t: (mean([1 / x.weight - 1 + math.log(x.weight) for x in t.whole]) <= 0.04) * t.weight,
    ),
}
KLS: dict[str, tuple[dict[str, Any], Callable[[Token], float]]] = {
    "k2": (KL, lambda t: (t.now - t.reference) ** 2 / 2),
    "weighted k3": (KL | {"estimator": "weighted_k3"}, lambda t: t.ratio * k3(t)),
    "clamped": (KL | {"clamp": 0.02}, lambda t: min((t.now - t.reference) ** 2 / 2, 0.02)),
}
UP_TO = {"kind": "ratio", "over": "token", "upper": 1.2}


def times_plain(factor: Callable[[Token], float]) -> Callable[[Token], float]:
    return lambda t: factor(t) * plain(t)


def plain_and(kl: Callable[[Token], float]) -> Callable[[Token], float]:
    return lambda t: plain(t) + COEFFICIENT * kl(t)


FORMULAS: dict[str, tuple[dict[str, Any], Callable[[Token], float]]] = {
    "its default clips": ({}, plain),
    "rejected tokens keep their KL": (
        {"policy_loss": {"rejection": UP_TO | ALL}, "kl": KL},
        lambda t: (t.weight <= 1.2) * plain(t) + COEFFICIENT * (t.now - t.reference) ** 2 / 2,
    ),
    **{name: ({"policy_loss": {"objective": each}}, of) for name, (each, of) in OBJECTIVES.items()},
    **{f"weights: {n}": ({"policy_loss": {"behaviour_weight": w}}, times_plain(of)) for n, (w, of) in WEIGHTS.items()},
    **{
        name: ({"policy_loss": {"behaviour_weight": weight, "rejection": rejection | ALL}}, times_plain(of))
        for name, (weight, rejection, of) in MASKS.items()
    },
    **{f"KL: {name}": ({"kl": kl}, plain_and(of)) for name, (kl, of) in KLS.items()},
}


def rejected(token: Token, estimator: str, over: str, limit: float) -> bool:
    def far(each: Token) -> float:
        log_ratio = each.old - each.sampled
        k3_reverse = 1 / each.weight - 1 + log_ratio
        estimates = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": each.weight - 1 - log_ratio}
        return (estimates | {"k3_reverse": k3_reverse})[estimator]

    numbers = [far(each) for each in token.whole]
    if over == "token":
        return abs(far(token)) > limit
    return abs({"mean": mean(numbers), "sum": sum(numbers), "max": max(map(abs, numbers))}[over]) > limit


def batch(**options: Any) -> tuple[Roles, Experience, list[list[Token]]]:
    """Updates over made-up numbers in float64: ratios, weights and signs on every side of every bound."""
    policy, value = models(torch.float64)
    roles, experience = make(policy, value, config(**options))
    lengths = list(experience.lengths)
    now = roles.policy.logprobs([each.response for each in experience.scored])
    draw = torch.Generator().manual_seed(3)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(now.shape, generator=draw, dtype=torch.float64)

    old, reference = now + noise(0.5), now + noise(0.4)
    sampled = old + noise(0.3)
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0], dtype=torch.float64).repeat_interleave(
        torch.tensor(lengths)
    )
    advantages = signs * (0.2 + noise(1.0).abs())
    parts = sampled.split(lengths)
    scored = [
        replace(each, response=replace(each.response, logprobs=part))
        for each, part in zip(experience.scored, parts, strict=True)
    ]
    made = replace(
        experience, scored=tuple(scored), old_logprobs=old, reference_logprobs=reference, advantages=advantages
    )
    columns = (now, old, sampled, reference, advantages)
    rows = [
        [Token(*map(float, numbers)) for numbers in zip(*each, strict=True)]
        for each in zip(*(x.split(lengths) for x in columns), strict=True)
    ]
    responses = [[replace(token, whole=row) for token in row] for row in rows]
    roles.policy.learner, roles.value.learner = Gathered(policy.model), Gathered(value.model)
    return roles, made, responses


def policy_line(roles: Roles, experience: Experience) -> dict[str, float]:
    report = roles.policy.train(experience, state(COEFFICIENT))
    return {name: metric.value for name, metric in report.metrics.items()}


@pytest.mark.parametrize("name", FORMULAS)
def test_the_loss_of_the_policy_is_the_formula_of_its_settings(name: str) -> None:
    options, formula = FORMULAS[name]
    roles, experience, responses = batch(**options)
    tokens = [token for response in responses for token in response]
    wanted = mean([formula(token) for token in tokens])
    if name.startswith(("gspo", "gmpo")):  # one ratio for a response implies one vote for it
        wanted = mean([mean([formula(token) for token in response]) for response in responses])
    assert policy_line(roles, experience)["policy/loss"] == pytest.approx(wanted, rel=1e-9)
    assert name == "its default clips" or abs(wanted - mean([plain(token) for token in tokens])) > 1e-3


@pytest.mark.parametrize(
    ("aggregation", "weigh"),
    [
        ({"aggregation": "token_mean"}, lambda losses: mean([x for each in losses for x in each])),
        ({"aggregation": "response_mean"}, lambda losses: mean([mean(each) for each in losses])),
        (
            {"aggregation": {"kind": "constant", "divisor": 3.5}},
            lambda losses: mean([sum(each) / 3.5 for each in losses]),
        ),
        ({"aggregation": "constant"}, lambda losses: mean([sum(each) / 11 for each in losses])),
    ],
)
def test_an_average_is_over_what_it_says(
    aggregation: dict[str, Any], weigh: Callable[[list[list[float]]], float]
) -> None:
    roles, experience, responses = batch(policy_loss=aggregation, rollout={"max_new_tokens": 11})
    wanted = weigh([[plain(token) for token in response] for response in responses])
    assert policy_line(roles, experience)["policy/loss"] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    ("estimator", "over", "limit"),
    [
        ("k1", "token", 0.3),
        ("k2", "token", 0.05),
        ("k3", "token", 0.05),
        ("k1", "mean", 0.1),
        ("k1", "sum", 0.4),
        ("k1", "max", 0.5),
        ("k2", "mean", 0.05),
        ("k3", "sum", 0.2),
        ("k2", "max", 0.12),
        ("k3_reverse", "token", 0.05),
    ],
)
def test_what_is_rejected_is_in_neither_the_loss_nor_its_denominator(estimator: str, over: str, limit: float) -> None:
    rejection = {"kind": "divergence", "estimator": estimator, "over": over, "limit": limit}
    roles, experience, responses = batch(policy_loss={"rejection": rejection})
    tokens = [token for response in responses for token in response]
    left = [plain(token) for token in tokens if not rejected(token, estimator, over, limit)]
    assert 0 < len(left) < len(tokens)
    found = policy_line(roles, experience)
    assert found["policy/loss"] == pytest.approx(mean(left), rel=1e-9)
    assert found["policy/rejected_fraction"] == pytest.approx(1 - len(left) / len(tokens))


def bounded_ratio(token: Token, over: str) -> float:
    weights = [each.weight for each in token.whole]
    found = {"token": token.weight, "geometric_mean": geometric_mean(token), "product": product(token)}
    return (found | {"max": max(weights)})[over]


@pytest.mark.parametrize("denominator", ["kept", "all"])
@pytest.mark.parametrize("over", ["token", "geometric_mean", "product", "max"])
def test_what_is_out_of_the_bounds_of_a_ratio_is_rejected_and_counts_where_it_is_asked_to(
    over: str, denominator: str
) -> None:
    rejection = {"kind": "ratio", "over": over, "lower": 0.9, "upper": 1.25, "denominator": denominator}
    roles, experience, responses = batch(policy_loss={"rejection": rejection})
    tokens = [token for response in responses for token in response]
    left = [plain(token) for token in tokens if 0.9 <= bounded_ratio(token, over) <= 1.25]
    below = [token for token in tokens if bounded_ratio(token, over) < 0.9]
    assert 0 < len(left) < len(tokens)
    found = policy_line(roles, experience)
    count = len(left) if denominator == "kept" else len(tokens)
    assert found["policy/loss"] == pytest.approx(sum(left) / count, rel=1e-9)
    assert found["policy/rejected_fraction"] == pytest.approx(1 - len(left) / len(tokens))
    assert found["policy/rejected_below_fraction"] == pytest.approx(len(below) / len(tokens))


def test_a_step_of_which_all_is_rejected_makes_no_update() -> None:
    roles, experience, _ = batch(policy_loss={"rejection": {"kind": "divergence", "limit": 1e-9}})
    assert policy_line(roles, experience) == {"policy/rejected_fraction": 1.0}
    assert not roles.policy.learner.gradients  # type: ignore[attr-defined]


def test_the_metrics_of_the_sampler_are_over_all_tokens_and_both_bounds() -> None:
    loss = {"behaviour_weight": {"kind": "masked", "cap": 1.3, "floor": 0.8}}
    roles, experience, responses = batch(policy_loss=loss)
    weights = [token.weight for response in responses for token in response]
    found = policy_line(roles, experience)
    assert found["policy/behaviour_weight"] == pytest.approx(mean(weights))
    assert found["policy/behaviour_clip_fraction"] == pytest.approx(mean([not 0.8 <= w <= 1.3 for w in weights]))


def squared(error: float) -> float:
    return error**2 / 2


def huber(error: float, delta: float) -> float:
    return squared(error) if abs(error) <= delta else delta * (abs(error) - delta / 2)


VALUES: dict[str, tuple[Mapping[str, Any], Callable[[float], float], float]] = {
    "squared": ({"clip": 0.15}, squared, 0.15),
    "without a clip": ({"clip": None}, squared, math.inf),
    "huber": ({"error": {"kind": "huber", "delta": 0.6}, "clip": 0.3}, lambda e: huber(e, 0.6), 0.3),
    "smooth_l1": ({"error": "smooth_l1", "clip": 0.25}, lambda e: huber(e, 1.0), 0.25),
}


@pytest.mark.parametrize("name", VALUES)
def test_the_loss_of_the_values_is_the_formula_of_its_settings(name: str) -> None:
    options, loss, clip = VALUES[name]
    roles, experience, _ = batch(value_loss=options)
    now = roles.value.values([each.response for each in experience.scored])
    ends = segment_sum(torch.ones(sum(experience.lengths), dtype=torch.long), experience.lengths).add(1).cumsum(0) - 1
    before_tokens = torch.ones(len(now), dtype=torch.bool)
    before_tokens[ends] = False
    draw = torch.Generator().manual_seed(4)
    old = now.clone()
    old[before_tokens] += torch.randn(int(before_tokens.sum()), generator=draw, dtype=torch.float64)
    returns = now[before_tokens] + 2 * torch.randn(int(before_tokens.sum()), generator=draw, dtype=torch.float64)
    report = roles.value.train(replace(experience, values=old, returns=returns), state())
    wanted = []
    for value, before, target in zip(
        now[before_tokens].tolist(), old[before_tokens].tolist(), returns.tolist(), strict=True
    ):
        near = before + min(max(value - before, -clip), clip)
        wanted.append(max(loss(value - target), loss(near - target)))
    assert report.metrics["value/loss"].value == pytest.approx(mean(wanted), rel=1e-9)
