"""Every setting of `score` reaches what a response is rewarded with, by value, over one batch of all kinds of answers.

Settings differ from each other and from their defaults, so that two of them swapped, or one left out, give other
numbers. What is done to a score is written again with Python's floats, answer by answer.
"""

from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import pytest
import torch

from proximo.algorithms.advantages import RunningMoments
from proximo.config.ppo.options import PPOConfig
from proximo.ppo.experience import count_responses, shape_scores
from proximo.records import Finish, Scored, ScoreState
from records_made import response, scored

LIMIT = 9
EARLIER = [2.0, -7.0, 4.5]
"""Scores of the steps before, as they entered the moments."""
ANSWERS: list[tuple[float, int, Finish, dict[str, Any]]] = [
    (3.0, 4, Finish.EOS, {}),
    (-8.0, LIMIT, Finish.EOS, {}),
    (1.5, 2, Finish.STOP, {}),
    (6.0, 9, Finish.LENGTH, {}),
    (-2.0, 7, Finish.LENGTH, {}),
    (0.25, 1, Finish.LENGTH, {}),
    (5.0, 3, Finish.EOS, {"token_rewards": (0.5, -4.0, 1.25)}),
    (4.0, 3, Finish.LENGTH, {"prefix_scores": (0.25, 2.0, -3.5, 1.0)}),
    (2.0, 2, Finish.STOP, {"token_rewards": (3.0, 0.5), "prefix_scores": (0.5, 1.0, -0.25)}),
    (50.0, 3, Finish.EOS, {"state": ScoreState.INFRASTRUCTURE_FAULT}),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "bias and scale": {"bias": 0.7, "scale": 1.3},
    "an answer": {"minus_reference_answer": True, "scale": 1.3},
    "clip": {"bias": 0.7, "scale": 1.3, "clip": 2.1},
    "divided": {"bias": 0.7, "scale": 1.3, "normalise": "scale"},
    "all that divides": {"bias": 0.7, "scale": 1.3, "normalise": "standardise", "clip": 0.9, "truncation.scale": 0.4},
    "no score where cut": {"bias": 0.7, "normalise": "standardise", "truncation.kind": "unscored"},
    "short, but no score where cut": {
        "bias": 2.0,
        "truncation.kind": "unscored",
        "min_tokens": 3,
        "min_tokens_penalty": 7.0,
    },
    "a cut one": {"truncation.scale": 0.4, "missing_eos_penalty": 1.7},
    "penalties": {
        "missing_eos_penalty": 1.7,
        "min_tokens": 3,
        "min_tokens_penalty": 2.3,
        "overlong_buffer_tokens": 5,
        "overlong_penalty": 0.6,
    },
    "a short one": {"min_tokens": 3, "min_tokens_penalty": 2.3, "clip": 2.1},
    "a long one": {"overlong_buffer_tokens": 5, "overlong_penalty": 0.6, "scale": 1.3},
}
for name in ("penalties", "a short one", "a long one"):
    OPTIONS[f"{name}, in the place of the score"] = OPTIONS[name] | {"penalty_mode": "replace", "truncation.scale": 0.4}


def batch() -> list[Scored]:
    return [
        replace(scored(score, of=response([7] * size, finish=finish)), answer_score=0.5 * place, **fields)
        for place, (score, size, finish, fields) in enumerate(ANSWERS)
    ]


def clipped(x: float, limit: float | None) -> float:
    return x if limit is None else min(max(x, -limit), limit)


def has_score(each: Scored, options: dict[str, Any]) -> bool:
    return each.valid and (each.response.finish is not Finish.LENGTH or "truncation.kind" not in options)


def first_part(each: Scored, options: dict[str, Any]) -> float:
    answer = (each.answer_score or 0.0) if options.get("minus_reference_answer") else 0.0
    return (each.score - answer + options.get("bias", 0.0)) * options.get("scale", 1.0)


def worth(each: Scored, options: dict[str, Any], seen: list[float]) -> tuple[float, list[float], bool]:
    """What the answer is rewarded with, what its tokens earn of that, and whether it lost something to a penalty."""
    size, limit = len(each.response.token_ids), options.get("clip")
    if not has_score(each, options):
        return 0.0, [0.0] * size, False
    mode = options.get("normalise", "none")
    mean, spread = fmean(seen) if mode == "standardise" else 0.0, 1.0 if mode == "none" else stdev(seen)
    value, factor = (first_part(each, options) - mean) / spread, options.get("scale", 1.0) / spread
    own = [factor * x for x in each.token_rewards or [0.0] * size]
    levels = [factor * x for x in each.prefix_scores or [0.0] * (size + 1)]
    earned = [clipped(own[t], limit) + clipped(levels[t + 1], limit) - clipped(levels[t], limit) for t in range(size)]
    value = clipped(value - sum(own) - levels[-1], limit) + sum(earned)
    shrink = options.get("truncation.scale", 1.0) if each.response.finish is Finish.LENGTH else 1.0
    value, earned = value * shrink, [x * shrink for x in earned]
    lost = options.get("missing_eos_penalty", 0.0) if each.response.finish is Finish.LENGTH else 0.0
    lost += options.get("min_tokens_penalty", 0.0) if size < options.get("min_tokens", 0) else 0.0
    if lost and options.get("penalty_mode") == "replace":
        value, earned = 0.0, [0.0] * size
    if buffer := options.get("overlong_buffer_tokens"):
        lost += options["overlong_penalty"] * min(max((size - (LIMIT - buffer)) / buffer, 0.0), 1.0)
    return value - lost, earned, lost > 0


@pytest.mark.parametrize("name", OPTIONS)
def test_what_a_response_is_rewarded_with_is_the_formula_of_the_settings(name: str) -> None:
    options, records = OPTIONS[name], batch()
    truncation = {key.partition(".")[2]: value for key, value in options.items() if key.startswith("truncation.")}
    score = {key: value for key, value in options.items() if not key.startswith("truncation.")}
    config = PPOConfig(score=score, truncation=truncation, rollout={"max_new_tokens": LIMIT})
    counts = torch.tensor([each.valid and place != 1 for place, each in enumerate(records)])
    squares = sum((x - fmean(EARLIER)) ** 2 for x in EARLIER)
    moments = RunningMoments(count=len(EARLIER), mean=fmean(EARLIER), squares=squares)
    found = shape_scores(
        records, count_responses(records, config)._replace(counted=counts), config=config, moments=moments
    )
    part_of_moments = [each for each, has in zip(records, counts, strict=True) if has and has_score(each, options)]
    seen = EARLIER + [first_part(each, options) for each in part_of_moments]
    wanted = [worth(each, options, seen) for each in records]
    assert found.values.tolist() == pytest.approx([value for value, _, _ in wanted], rel=1e-5, abs=1e-6)
    assert found.token_rewards.tolist() == pytest.approx([x for _, each, _ in wanted for x in each], rel=1e-5, abs=1e-6)
    if found.penalised is not None:
        lost = [of[2] and has for of, has in zip(wanted, counts.tolist(), strict=True)]
        assert found.penalised.tolist() == lost
    assert (found.penalised is None) == ("penalty" not in " ".join(options))
    if options.get("normalise", "none") != "none":
        assert (found.moments.count, found.moments.mean) == (len(seen), pytest.approx(fmean(seen)))
    else:
        assert found.moments == moments
    assert found.counted.tolist() == [any(each is other for other in part_of_moments) for each in records]
