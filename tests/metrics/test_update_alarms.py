"""Alarms about what keeps the policy from learning: tokens that are left out, and a KL in the loss that is too dear."""

import random
from typing import Any

import pytest
from made_up_runs import ppo_line

from proximo.metrics.alarms import Alarm, find_alarms
from proximo.metrics.run_files import Run
from proximo.ppo.kind import PPO

NUM_STEPS = 60
LEFT_OUT = "Most tokens are excluded from the updates"
TOO_FAST = "The learning rate is far too high"
OUTPULLS = "The KL in the loss outweighs the advantages"


def alarms(settings: dict[str, Any], *, num_steps: int = NUM_STEPS, **metrics: float) -> tuple[Alarm, ...]:
    """Of a healthy run with these metrics in every step."""
    rng = random.Random(11)
    changes = {name.replace("__", "/"): value for name, value in metrics.items()}
    lines = tuple(ppo_line(step, NUM_STEPS, rng) | changes for step in range(1, num_steps + 1))
    return find_alarms(Run(name="run", lines=lines, config={"ppo": settings}, total_steps=NUM_STEPS), PPO.metrics.rules)


def titles(settings: dict[str, Any], **metrics: float) -> list[str]:
    return [alarm.title for alarm in alarms(settings, **metrics)]


@pytest.mark.parametrize(("share", "found"), [(0.5, []), (0.51, [LEFT_OUT]), (1.0, [LEFT_OUT])])
def test_a_rejection_of_most_tokens_is_said_in_the_fifth_step(share, found):
    settings = {"policy_loss": {"rejection": {"kind": "divergence", "estimator": "k1", "over": "sum", "limit": 0.001}}}
    assert titles(settings, policy__rejected_fraction=share) == found
    assert [each.title for each in alarms(settings, num_steps=5, policy__rejected_fraction=share)] == found
    assert alarms(settings, num_steps=4, policy__rejected_fraction=share) == ()


def test_it_is_told_with_the_limit():
    settings = {"policy_loss": {"rejection": {"kind": "divergence", "estimator": "k1", "over": "sum", "limit": 0.001}}}
    (alarm,) = alarms(settings, policy__rejected_fraction=0.973)
    assert alarm.detail == "97% of the counted tokens in the last fifth."
    assert alarm.advice.startswith(
        "ppo.policy_loss.rejection.limit is 0.001. The policy does not learn from excluded tokens."
    )


@pytest.mark.parametrize(
    ("part", "settings", "metric"),
    [
        ("rejection", {"kind": "ratio", "lower": 0.5, "upper": 2.0}, "rejected"),
        ("behaviour_weight", {"kind": "masked", "floor": 0.5, "cap": 2.0}, "behaviour_clip"),
    ],
)
def test_of_two_bounds_the_one_that_leaves_out_most_is_told(part: str, settings: dict[str, Any], metric: str) -> None:
    low, high = (name for name in settings if name != "kind")
    for below, bound in ((0.2, f"{high} is 2"), (0.4, f"{low} is 0.5")):
        shares = {f"policy__{metric}_fraction": 0.6, f"policy__{metric.removesuffix('_clip')}_below_fraction": below}
        (alarm,) = alarms({"policy_loss": {part: settings}}, **shares)
        assert alarm.advice.startswith(f"ppo.policy_loss.{part}.{bound}. ")


@pytest.mark.parametrize(("weight", "found"), [("masked", [LEFT_OUT]), ("truncated", [])])
def test_weights_that_are_cut_to_0_leave_out_as_well_and_those_cut_to_a_bound_do_not(weight, found):
    settings = {"policy_loss": {"behaviour_weight": {"kind": weight, "cap": 2.0}}}
    assert titles(settings, policy__behaviour_clip_fraction=0.7) == found


GAE = {"kind": "gae", "standardise": True}


@pytest.mark.parametrize(
    ("coefficient", "advantage", "found"),
    [
        # The root of twice 0.005 is 0.1 nats: 10 of them outweigh a standardised advantage.
        (9.9, GAE, []),
        (10.1, GAE, [OUTPULLS]),
        (10.1, {"kind": "group_centred", "standardise": True}, [OUTPULLS]),
        # Not standardised they are as large as advantage/std says.
        (10.1, {"kind": "gae", "standardise": False}, [OUTPULLS]),
        (2.9, {"kind": "gae", "standardise": False}, []),
        (3.1, {"kind": "gae", "standardise": False}, [OUTPULLS]),
    ],
)
def test_a_kl_in_the_loss_is_weighed_against_advantages(coefficient, advantage, found):
    settings = {"kl": {"kind": "loss"}, "advantage": advantage}
    level = {"kl__k3_per_token": 0.005, "advantage__std": 0.3, "score__mean": 0.2, "score__std": 0.4}
    assert found == [
        each for each in titles(settings, kl__coefficient=coefficient, **level) if each != "The score does not rise"
    ]


def test_it_explains_a_score_that_does_not_rise_and_is_silent_where_the_kl_is_in_the_reward():
    level = {"kl__k3_per_token": 0.005, "kl__coefficient": 12.0, "score__mean": 0.2, "score__std": 4.0}
    (alarm,) = alarms({"kl": {"kind": "loss"}, "advantage": GAE}, **level)
    assert alarm.title == OUTPULLS
    assert [each.title for each in alarm.consequences] == ["The score does not rise"]
    assert alarm.detail == (
        "The log-ratio of a token to the reference is about 0.10 nats, which gives the KL a weight of 1.20 at a "
        "coefficient of 12; the weight of its advantage is 1.00."
    )
    assert OUTPULLS not in titles({"kl": {"kind": "reward"}, "advantage": GAE}, **level)


DRIFTS = "The engine samples from another policy than the learner's"


@pytest.mark.parametrize(("divergence", "found"), [(0.09, []), (0.11, [DRIFTS])])
def test_an_engine_that_is_far_from_the_learner_is_said(divergence, found):
    assert titles({}, mismatch__k3=divergence) == found


ONE_UPDATE = {"prompts_per_step": 8, "responses_per_prompt": 8, "minibatch_responses": 64, "epochs_per_step": 1}
STILL = {"policy__clip_fraction": 0.0, "policy__approx_kl": 1e-13, "score__mean": 0.2}


@pytest.mark.parametrize(
    ("settings", "far", "found"),
    [
        # One update a step is made at a ratio of 1: clipping and movement are 0 by definition.
        (ONE_UPDATE, 0.2, False),
        (ONE_UPDATE, 1e-6, True),
        (ONE_UPDATE | {"minibatch_responses": None, "num_minibatches": 1}, 0.2, False),
        (ONE_UPDATE | {"minibatch_responses": None, "num_minibatches": 2}, 0.2, True),
        (ONE_UPDATE | {"minibatch_responses": 32}, 0.2, True),
        (ONE_UPDATE | {"epochs_per_step": 2}, 0.2, True),
    ],
)
def test_a_policy_with_one_update_a_step_is_still_only_if_it_stays_at_the_reference(settings, far, found):
    assert ("The policy hardly moves" in titles(settings, kl__k3_per_token=far, **STILL)) == found


def test_with_one_update_a_step_a_flat_score_is_not_put_down_to_the_clip_fraction():
    (alarm,) = alarms(ONE_UPDATE, kl__k3_per_token=0.2, **STILL)
    assert alarm.title == "The score does not rise"
    assert "clipped" not in alarm.advice


def test_a_score_that_falls_while_the_policy_moves_asks_for_smaller_steps():
    rng = random.Random(11)
    lines = tuple(ppo_line(step, NUM_STEPS, rng) | {"score/mean": 0.8 - 0.005 * step} for step in range(1, NUM_STEPS))
    found = find_alarms(Run(name="run", lines=lines, config={"ppo": {}}, total_steps=NUM_STEPS), PPO.metrics.rules)
    (alarm,) = [each for each in found if each.title == "The score does not rise"]
    assert alarm.advice.startswith("It falls: the updates follow noise more than the score. Lower ppo.policy_optimizer")


@pytest.mark.parametrize(("rate", "found"), [(0.1, []), (0.11, [TOO_FAST]), (1e6, [TOO_FAST])])
def test_a_learning_rate_that_no_model_survives_is_named_after_the_first_step(rate, found):
    settings = {"policy_optimizer": {"learning_rate": rate}, "value_optimizer": {"learning_rate": 1e6}}
    assert titles(settings) == found
    assert [each.title for each in alarms(settings, num_steps=1)] == found


def test_a_learning_rate_that_no_model_survives_comes_before_what_it_does():
    settings = {"policy_optimizer": {"learning_rate": 1e6}, "value_optimizer": {"learning_rate": 1e-5}}
    first, noise = alarms(settings, policy__entropy=5.6, policy__clip_fraction=0.6, response__finished_fraction=0.0)
    assert first.detail == "ppo.policy_optimizer.learning_rate is 1e+06."
    assert {"The clip fraction is high", "Nearly all answers are cut at the limit"} <= {
        each.title for each in first.consequences
    }
    assert noise.title == "The policy samples noise"  # from the first step on, so before any update


@pytest.mark.parametrize("entropy", [0.01, 1.5, 5.6])
@pytest.mark.parametrize("finished", [0.0, 1.0])
def test_a_score_that_never_differs_is_said_first_whatever_the_policy_samples(entropy, finished):
    level = {"score__mean": 0.0, "score__std": 0.0, "score__best_fraction": 1.0, "gold__mean": 0.5}
    first, *_ = alarms({}, policy__entropy=entropy, response__finished_fraction=finished, **level)
    assert first.title == "Every score is the same number"
