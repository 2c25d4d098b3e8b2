"""The numbers of a step, worked by hand: three responses, of which the last could not be scored."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from proximo.algorithms.advantages import NOTHING_SEEN, ReturnSpread
from proximo.algorithms.losses import policy_statistics
from proximo.config.ppo.objectives import GSPOConfig, PPOObjectiveConfig
from proximo.config.ppo.options import PPOConfig
from proximo.metrics.catalogue import step_line
from proximo.metrics.values import MetricValue
from proximo.models.precision.placement import Precision
from proximo.ppo.experience import RawAdvantages, StepExperience, sequence_kl
from proximo.ppo.step_metrics import StepOutcome, experience_metrics, score_metrics, time_metrics, update_metrics
from proximo.ppo.update.epochs import Report
from proximo.ppo.update.guards import broken_limits
from proximo.records import Experience, Finish, Scored, ScoreState
from records_made import prompt, response, scored
from roles_made import outcome_of

PPO = PPOObjectiveConfig()

NAN = math.nan
SPREAD = ReturnSpread(deviation=0.5, seen=NOTHING_SEEN, is_flat=False)


def batch() -> tuple[Scored, ...]:
    good = replace(scored(2.0, of=response((7, 8, 2))), components={"style": 1.0})
    cut = replace(scored(0.0, of=response((7, 8), finish=Finish.LENGTH)), components={"style": 3.0, "form": 5.0})
    lost = scored(NAN, of=response((9, 9, 9, 9)), state=ScoreState.INFRASTRUCTURE_FAULT)
    return good, cut, replace(lost, components={"style": 99.0})


def experience(**changes) -> Experience:
    """What must not be read is NaN."""
    made = Experience(
        scored=batch(),
        lengths=(3, 2, 4),
        mask=torch.tensor([True] * 5 + [False] * 4),
        old_logprobs=torch.tensor([-1.0, -2.0, -3.0, -0.5, -1.5, *[NAN] * 4]),
        reference_logprobs=torch.tensor([-1.5, -2.0, -2.0, -1.5, -0.5, *[NAN] * 4]),
        values=torch.tensor([0.5, 1.0, 1.5, NAN, 0.0, 0.0, NAN, *[NAN] * 5]),
        rewards=torch.tensor([0.1, 0.2, 2.0, -0.3, 0.4, *[NAN] * 4]),
        advantages=torch.tensor([1.0, -1.0, 1.0, 0.0, 0.0, *[0.0] * 4]),
        returns=torch.tensor([1.0, 1.0, 2.0, 0.0, 1.0, *[NAN] * 4]),
    )
    return replace(made, **changes)


RAW = RawAdvantages(mean=0.4, variance=0.25, num_tokens=5, spread=SPREAD)
GROUPS = PPOConfig(advantage="group_centred", responses_per_prompt=2)


def outcome(made: Experience, *, raw: RawAdvantages = RAW, **changes: Any) -> StepOutcome:
    shaped: Any = None
    return outcome_of(StepExperience(made, raw, shaped), **({"policy": Report(metrics={}, refusals=())} | changes))


def measured(made: Experience, *, config: PPOConfig = GROUPS, **changes: Any) -> dict[str, float]:
    return line(experience_metrics(outcome(made, **changes), config))


def line(metrics: Mapping[str, MetricValue]) -> dict[str, float]:
    """As it would be logged: every name must be declared, with its reduction."""
    found, non_finite = step_line(metrics)
    assert non_finite == []
    return found


def k3(difference: float) -> float:
    return math.exp(-difference) - 1 + difference


EXPECTED = {
    "score/mean": 1.0,
    "score/std": 1.0,
    "score/best_fraction": 0.5,
    # the longer of the two has the higher score
    "score/length_correlation": 1.0,
    "score/style/mean": 2.0,
    "score/form/mean": 5.0,
    "reward/mean": (2.3 + 0.1) / 2,
    "advantage/mean": 0.4,
    "advantage/std": 0.5,
    "reward/std": 0.5,
    "advantage/flat": 0.0,
    "response/tokens_mean": 2.5,
    "response/tokens_max": 3,
    "response/finished_fraction": 0.5,
    # (7, 8), (8, 2) and once more (7, 8)
    "response/distinct_2": 2 / 3,
    "response/repeat_4gram": 0.0,
    "response/unscored": 1,
    # the mean of -log-prob over the five tokens that count
    "policy/entropy": (1 + 2 + 3 + 0.5 + 1.5) / 5,
    # differences 0.5, 0, -1 of the first response and 1, -1 of the second
    "kl/sequence": (-0.5 + 0.0) / 2,
    "kl/per_token": -0.5 / 5,
    "kl/k3_per_token": (k3(0.5) + 2 * k3(-1) + k3(1)) / 5,
    # returns - values: 0.5, 0, 0.5, 0, 1 with variance 0.14; the returns' own is 0.4
    "value/explained_variance": 1 - 0.14 / 0.4,
}


def test_a_step_in_numbers_worked_by_hand() -> None:
    assert measured(experience()) == pytest.approx(EXPECTED, rel=1e-5)


def test_length_and_score_are_correlated_where_both_differ() -> None:
    lengths, scores = (1, 2, 4, 5), (4.0, 3.0, 3.0, 0.0)
    many = [scored(score, of=response((7,) * length)) for length, score in zip(lengths, scores, strict=True)]
    found = line(score_metrics(many))
    # deviations -2, -1, 1, 2 and 1.5, 0.5, 0.5, -2.5
    assert found["score/length_correlation"] == pytest.approx(-8 / math.sqrt(10 * 9))
    assert found["score/best_fraction"] == 0.25
    for equal in ([many[0]] * 3, [many[1], replace(many[2], score=9.0, response=many[1].response)], many[:1], []):
        assert "score/length_correlation" not in line(score_metrics(equal))


def test_a_response_without_a_token_that_counts_has_no_part_in_the_means_of_reward_and_kl() -> None:
    made = experience(mask=torch.tensor([True] * 3 + [False] * 6))
    found = measured(made)
    assert (found["reward/mean"], found["kl/sequence"]) == (pytest.approx(2.3), pytest.approx(-0.5))


def test_a_run_without_a_reference_has_no_kl() -> None:
    made = experience(reference_logprobs=None)
    found = measured(made)
    assert found == pytest.approx({k: v for k, v in EXPECTED.items() if not k.startswith("kl/")}, rel=1e-5)
    assert sequence_kl(made) == [None, None, None]


def test_the_kl_of_a_response_is_the_sum_over_its_counted_tokens() -> None:
    assert sequence_kl(experience()) == pytest.approx([-0.5, 0.0, 0.0])
    partly = experience(mask=torch.tensor([True, False, True, True, False, *[False] * 4]))
    assert sequence_kl(partly) == pytest.approx([-0.5, 1.0, 0.0])
    fewer = experience(mask=torch.tensor([True, True, False, True, False, *[False] * 4]))
    assert sequence_kl(fewer) == pytest.approx([0.5, 1.0, 0.0])


def test_a_token_that_the_policy_did_not_write_counts_nowhere() -> None:
    mask = torch.tensor([True, False, True, True, True, *[False] * 4])
    poisoned = {
        name: torch.where(torch.arange(9) == 1, NAN, getattr(experience(), name))
        for name in ("old_logprobs", "reference_logprobs", "rewards", "returns")
    }
    raw = RawAdvantages(mean=0.4, variance=0.25, num_tokens=4, spread=SPREAD)
    found = measured(experience(mask=mask, **poisoned), raw=raw)
    assert found["reward/mean"] == pytest.approx((2.1 + 0.1) / 2)
    assert found["policy/entropy"] == pytest.approx((1 + 3 + 0.5 + 1.5) / 4)
    assert found["kl/sequence"] == pytest.approx((-0.5 + 0.0) / 2)
    assert found["kl/per_token"] == pytest.approx(-0.5 / 4)


def one_token_each(names: Sequence[str], advantages: list[float], **changes) -> Experience:
    """One response of one token to each of these prompts, without critic and reference."""
    answers = [scored(1.0, of=response((7,), to=prompt(name))) for name in names]
    made = experience(
        scored=tuple(answers),
        lengths=(1,) * len(names),
        mask=torch.tensor([True] * len(names)),
        old_logprobs=torch.zeros(len(names)),
        reference_logprobs=None,
        values=None,
        rewards=torch.ones(len(names)),
        advantages=torch.tensor(advantages),
        returns=None,
    )
    return replace(made, **changes)


def test_without_a_critic_the_prompts_that_teach_nothing_are_counted() -> None:
    """Three prompts with two responses each: one teaches, though not by all of its responses; a fourth was lost."""
    names = ("p0", "p1", "p2", "p0", "p1", "p2", "p3")
    made = one_token_each(names, [0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0], mask=torch.tensor([True] * 6 + [False]))
    lost = scored(NAN, of=response((7,), to=prompt("p3")), state=ScoreState.INFRASTRUCTURE_FAULT)
    found = measured(replace(made, scored=(*made.scored[:6], lost)))
    assert found["group/zero_advantage_fraction"] == pytest.approx(2 / 3)
    assert "value/explained_variance" not in found


def test_a_group_of_equals_counts_as_teaching_nothing_after_standardising_too() -> None:
    """Standardising moved all advantages by the same: those of a group of equals are equal still, but not 0."""
    made = one_token_each(("p0", "p0", "p1", "p1"), [-0.2, 0.5, -0.2, -0.2])
    assert measured(made)["group/zero_advantage_fraction"] == 0.5
    assert "group/zero_advantage_fraction" not in measured(made, config=PPOConfig())


def test_where_nothing_could_be_scored_only_the_count_of_faults_is_left() -> None:
    lost = tuple(scored(NAN, of=each.response, state=ScoreState.INFRASTRUCTURE_FAULT) for each in batch())
    made = experience(scored=lost, mask=torch.zeros(9, dtype=torch.bool), values=None, returns=None)
    raw = RawAdvantages(mean=0.0, variance=0.0, num_tokens=0, spread=SPREAD)
    assert measured(made, raw=raw) == {
        "response/unscored": 3.0,
        "reward/std": 0.5,
    }


SECONDS = {
    "generate": 2.0,
    "score": 1.0,
    "sampled_logprobs": 0.0,
    "reference_logprobs": 0.5,
    "values": 0.25,
    "experience": 0.05,
    "train_policy": 4.0,
    "train_value": 1.0,
}


def test_times_by_call_and_tokens_per_second() -> None:
    value = Report(metrics={}, refusals=())
    found = line(time_metrics(outcome(experience(), value=value, seconds=SECONDS), num_epochs=3))
    # 9 tokens were sampled; with 3 prompts of 2 tokens two models read 15, three times each
    assert found == pytest.approx(
        {
            "time/rollout_seconds": 2.0,
            "time/score_seconds": 1.0,
            "time/reference_seconds": 0.5,
            "time/values_seconds": 0.25,
            "time/experience_seconds": 0.05,
            "time/train_policy_seconds": 4.0,
            "time/train_value_seconds": 1.0,
            "time/step_seconds": 8.8,
            "throughput/rollout_tokens_per_second": 4.5,
            "throughput/train_tokens_per_second": 15 * 3 * 2 / 5,
        }
    )


def test_a_step_on_scores_that_were_brought_has_no_rollout_time() -> None:
    seconds = {"experience": 0.5, "train_policy": 1.5}
    assert line(time_metrics(outcome(experience(), seconds=seconds), num_epochs=1)) == pytest.approx(
        {
            "time/experience_seconds": 0.5,
            "time/train_policy_seconds": 1.5,
            "time/step_seconds": 2.0,
            "throughput/train_tokens_per_second": 10.0,
        }
    )


def test_updates_that_were_not_come_to_count_for_no_throughput() -> None:
    """A third of the policy's three epochs and all of the value model's: 15 tokens four times in 5 seconds."""
    ended, value = Report(metrics={}, refusals=(), share_trained=1 / 3), Report(metrics={}, refusals=())
    found = line(time_metrics(outcome(experience(), policy=ended, value=value, seconds=SECONDS), num_epochs=3))
    assert found["throughput/train_tokens_per_second"] == pytest.approx(15 * 4 / 5)


def test_what_gspo_clips_before_anything_was_learned_is_rounding() -> None:
    everything = torch.ones(4, dtype=torch.bool)
    first = policy_statistics(torch.full((4,), 1e-3), torch.zeros(4), everything, everything)
    assert [name for name, *_ in broken_limits(first, precision="bf16", objective=PPO)] == ["clip_fraction"]
    assert broken_limits(first, precision="bf16", objective=GSPOConfig(kind="gspo")) == []


def test_the_clip_fraction_is_a_share_of_the_tokens() -> None:
    everything = torch.ones(4, dtype=torch.bool)
    half = torch.tensor([True, True, False, False])
    first = policy_statistics(torch.zeros(4), torch.zeros(4), half, everything)
    assert broken_limits(first, precision="bf16", objective=PPO) == [("clip_fraction", 0.5, 0.01)]


@pytest.mark.parametrize("precision", Precision)
def test_every_precision_has_limits(precision: Precision) -> None:
    everything = torch.ones(4, dtype=torch.bool)
    same, other = (policy_statistics(torch.full((4,), x), torch.zeros(4), ~everything, everything) for x in (0.0, 0.1))
    assert broken_limits(same, precision=precision, objective=PPO) == []
    assert broken_limits(other, precision=precision, objective=PPO)


@pytest.mark.parametrize(("difference", "refused"), [(0.0, 0.0), (5e-6, 0.0), (2e-5, 1.0), (2e-3, 1.0)])
def test_the_first_minibatch_says_how_far_the_learner_is_from_the_sampler(difference: float, refused: float) -> None:
    """float32 allows 1e-5 on average and 1e-3 at most."""
    old = torch.zeros(4, dtype=torch.float64)
    mask = torch.tensor([True, True, False, True])
    first = policy_statistics(old + difference, old, torch.zeros(4, dtype=torch.bool), mask)
    policy = Report(metrics={}, refusals=(), first_minibatch=first)
    assert line(
        update_metrics(outcome(experience(), policy=policy), precision="float32", objective=PPO)
    ) == pytest.approx(
        {
            "first_minibatch/max_abs_log_ratio": difference,
            "first_minibatch/mean_abs_log_ratio": difference,
            "first_minibatch/clip_fraction": 0.0,
            "first_minibatch/limit_exceeded": refused,
        }
    )
