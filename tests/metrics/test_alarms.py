"""Each sickness is found where it is, and nowhere else."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_runs import ppo_line, write_dpo_run, write_ppo_run, write_reward_run, write_sft_run

from proximo.metrics.alarms import Rule, Severity, fifth_noise, fifths, find_alarms
from proximo.metrics.catalogue import trainer_by_metrics
from proximo.metrics.run_files import Run, Series, read_run
from proximo.ppo.kind import PPO
from proximo.supervised.kinds import DPO, KTO, PRM, REWARD, SFT
from proximo.trainer_kinds import trainer_kinds

NUM_STEPS = 60


def healthy_lines(num_steps: int = NUM_STEPS) -> list[dict[str, float]]:
    rng = random.Random(11)
    return [ppo_line(step, num_steps, rng) for step in range(1, num_steps + 1)]


def ppo_run(**curves: Callable[[float], float]) -> Run:
    """A healthy run with some metrics replaced by functions of the part of the run that is over."""
    lines = healthy_lines()
    for name, curve in curves.items():
        for line in lines:
            line[name.replace("__", "/")] = curve(line["step"] / NUM_STEPS)
    return Run(name="run", lines=tuple(lines))


def wanders(part: float) -> float:
    """A score that goes nowhere."""
    return 0.2 + 0.1 * math.sin(9000 * part)


def stuck(part: float) -> float:
    """A score that rises a little, by less than answers differ, and then stays."""
    return min(0.3, part)


def titles(run: Run) -> list[str]:
    trainer = trainer_by_metrics(run.names)
    return [alarm.title for alarm in find_alarms(run, trainer.metrics.rules)]


def test_a_healthy_run_raises_no_alarm():
    for seed in range(20):
        rng = random.Random(seed)
        run = Run(name="run", lines=tuple(ppo_line(step, NUM_STEPS, rng) for step in range(1, NUM_STEPS + 1)))
        assert titles(run) == []


def test_the_made_up_stages_and_a_run_that_has_just_begun_raise_no_alarm(tmp_path: Path):
    lines = [{"step": step, "score/mean": -1.0 * step, "value/explained_variance": -9.0} for step in range(1, 5)]
    assert titles(Run(name="run", lines=tuple(lines))) == []
    made_up = {"sft": write_sft_run, "reward": write_reward_run, "dpo": write_dpo_run, "ppo": write_ppo_run}
    for name, write in made_up.items():
        assert titles(read_run(write(tmp_path / name))) == []


@pytest.mark.parametrize(("last_logprob", "raised"), [(-52.0, False), (-53.0, True)])
def test_chosen_answers_that_dpo_makes_unlikely_are_an_alarm(last_logprob: float, raised: bool, tmp_path: Path):
    """A quarter of -42 below it is -52.5."""
    run = read_run(write_dpo_run(tmp_path / "run", last_logprob=last_logprob))
    assert ("The chosen answers become much less likely" in titles(run)) == raised


@pytest.mark.parametrize(
    ("title", "curves"),
    [
        ("The score rises while the gold score falls", {"gold__mean": lambda part: 0.5 + part * (1 - part)}),
        ("The score does not rise", {"score__mean": wanders}),
        ("Entropy collapses", {"policy__entropy": lambda part: 2 * math.exp(-4 * part), "score__mean": stuck}),
        ("The clip fraction is high", {"policy__clip_fraction": lambda part: 0.5 * part}),
        (
            "The policy hardly moves",
            {"policy__clip_fraction": lambda part: 0.0, "policy__approx_kl": lambda part: 1e-8, "score__mean": wanders},
        ),
        (
            "The critic is no better than a constant",
            {"value__explained_variance": lambda part: -0.3 + 0.305 * part, "score__mean": stuck},
        ),
        ("Nearly all answers are cut at the limit", {"response__finished_fraction": lambda part: 0.9 - 0.89 * part}),
        ("Most groups have zero variance", {"group__zero_variance_fraction": lambda part: part, "score__mean": stuck}),
        ("Responses were unscored", {"response__unscored": lambda part: float(part == 0.5)}),
        ("Updates were skipped", {"value__skipped_updates": lambda part: float(part > 0.9)}),
        ("Some metrics were not finite", {"progress__non_finite_metrics": lambda part: float(part == 1)}),
    ],
)
def test_a_sick_run_raises_that_alarm_and_no_other(title, curves):
    assert titles(ppo_run(**curves)) == [title]


@pytest.mark.parametrize(
    "curves",
    [
        {"response__tokens_mean": lambda part: 30 + 60 * part, "score__task_reward_mean": lambda part: part},
        {"response__repeat_4gram": lambda part: 0.4 + 0.1 * part},
        {"group__zero_variance_fraction": lambda part: 0.45, "group__zero_advantage_fraction": lambda part: 0.9},
    ],
)
def test_what_looks_like_hacking_and_is_none_raises_no_alarm(curves):
    assert titles(ppo_run(**curves)) == []


def test_of_ten_steps_two_trends_are_compared_and_of_nine_they_are_not() -> None:
    for count, found in ((10, ["The score does not rise"]), (9, [])):
        lines = [{"step": step, "score/mean": -1.0 * step, "score/std": 1.0} for step in range(1, count + 1)]
        assert titles(Run(name="run", lines=tuple(lines))) == found


def test_a_gold_score_that_is_only_held_out_is_watched_too():
    lines = [
        {"step": step, "evaluation/score": step / 10, "evaluation/gold": 1 - abs(step - 4) / 10} for step in range(11)
    ]
    assert titles(Run(name="run", lines=tuple(lines))) == ["The score rises while the gold score falls"]


@pytest.mark.parametrize(
    ("r", "found"),
    [(0.8, ["Longer answers score higher"]), (-0.99, ["Shorter answers score higher"]), (0.6, []), (-0.6, [])],
)
def test_the_sign_says_whether_length_or_shortness_is_paid_for(r, found):
    assert titles(ppo_run(score__length_correlation=lambda part: r)) == found


def test_length_explains_nothing_where_scores_hardly_differ():
    """A few long wrong answers of a task that is solved."""
    curves = {
        "score__std": lambda part: 0.5 if part < 0.5 else 0.02,
        "score__length_correlation": lambda part: 0.1 if part < 0.5 else -0.95,
    }
    assert titles(ppo_run(**curves)) == []
    curves["score__std"] = lambda part: 0.5
    assert titles(ppo_run(**curves)) == []
    curves["score__length_correlation"] = lambda part: -0.95
    assert titles(ppo_run(**curves)) == ["Shorter answers score higher"]


def test_problems_come_before_warnings():
    run = ppo_run(policy__clip_fraction=lambda part: 0.9, policy__rejected_fraction=lambda part: 0.9)
    assert [alarm.severity for alarm in find_alarms(run, PPO.metrics.rules)] == [Severity.PROBLEM, Severity.WARNING]


def test_fifths_are_means_of_equal_parts():
    assert fifths(Series(tuple(range(10)), tuple(map(float, range(10))))) == (0.5, 2.5, 4.5, 6.5, 8.5)
    assert fifths(Series((1, 2, 3, 4), (0.0,) * 4)) is None


def test_noise_is_the_standard_error_of_a_fifth_and_knows_no_trend():
    rng = random.Random(4)
    values = tuple(50 * index + rng.gauss(0, 2) for index in range(2000))
    assert fifth_noise(Series(tuple(range(2000)), values)) == pytest.approx(2 / math.sqrt(400), rel=0.1)


def test_a_rule_explains_what_stands_after_it_and_nothing_else():
    """So that every alarm that is raised is shown, and once."""
    of_others = {rule.title for trainer in (SFT, REWARD, PRM, DPO, KTO) for rule in trainer.metrics.rules}
    for trainer in trainer_kinds():
        rules = trainer.metrics.rules
        titles = [rule.title for rule in rules]
        assert len(titles) == len(set(titles))
        for place, rule in enumerate(rules):
            unknown = set(rule.explains) - set(titles[place + 1 :])
            # The trainers with a loss share a rule, which names the effects in all of them.
            assert unknown <= (set() if trainer is PPO else of_others), (trainer, rule.title, unknown)


def test_an_alarm_is_shown_under_the_first_cause_of_its_causes():
    def rule(title: str, *explains: str, severity: Severity = Severity.WARNING, fires: bool = True) -> Rule:
        return Rule(title, severity, lambda run: "yes" if fires else None, explains=explains).worded(
            when="",
            advice="",
        )

    rules = (
        rule("a", "b", "d"),
        rule("b", "c"),
        rule("x", "e", fires=False),
        rule("c"),
        rule("d"),
        rule("e", severity=Severity.PROBLEM),
    )
    found = find_alarms(Run(name="run"), rules)
    assert [(alarm.title, [each.title for each in alarm.consequences]) for alarm in found] == [
        ("e", []),
        ("a", ["b", "c", "d"]),
    ]
    assert found[1].text == "a. yes  It explains: b, c, d."


@pytest.mark.parametrize("solved", [None, 1.0])
def test_a_solved_run_raises_no_alarm(solved):
    """All alike, sure of itself, repeating itself, its critic idle, its groups equal: that is what was wanted."""
    rng = random.Random(5)

    def right(part: float) -> float:
        return min(1.0, 0.35 + 3 * part)

    curves = {
        "score__mean": right,
        "score__std": lambda part: math.sqrt(right(part) * (1 - right(part))),
        "score__best_fraction": right,
        "policy__entropy": lambda part: 0.8 * math.exp(-8 * part),
        "value__explained_variance": lambda part: min(0.4, part) if part < 0.25 else rng.gauss(-9, 4),
        "response__distinct_2": lambda part: 0.1 + 0.4 * math.exp(-8 * part),
        "group__zero_variance_fraction": lambda part: right(part) ** 8,
    }
    run = replace(ppo_run(**curves), config={"ppo": {"solved_score": solved}})
    assert titles(run) == []
    fails = {**curves, "score__mean": lambda part: 0.35, "score__best_fraction": lambda part: 0.35}
    fails["score__std"] = lambda part: 0.48
    run = replace(ppo_run(**fails), config={"ppo": {"solved_score": solved}})
    assert {"Entropy collapses", "The critic is no better than a constant"} <= set(titles(run))


def test_a_run_that_was_solved_from_the_start_raises_no_alarm():
    rng = random.Random(5)
    share = {step: 0.97 + rng.gauss(0, 0.01) for step in range(NUM_STEPS + 1)}
    curves = {
        "score__mean": lambda part: share[round(part * NUM_STEPS)],
        "score__best_fraction": lambda part: share[round(part * NUM_STEPS)],
        "score__std": lambda part: 0.17,
    }
    assert titles(ppo_run(**curves)) == []
    curves["score__best_fraction"] = lambda part: 0.02
    assert titles(ppo_run(**curves)) == ["The score does not rise"]


def advice_of(run: Run) -> str:
    (alarm,) = find_alarms(run, PPO.metrics.rules)
    return alarm.advice


USELESS_CRITIC = {"value__explained_variance": lambda part: 0.0, "score__mean": stuck}


@pytest.mark.parametrize(
    ("curves", "words"),
    [
        ({"score__mean": wanders, "policy__clip_fraction": lambda part: 0.0}, "raise ppo.policy_optimizer"),
        ({"score__mean": wanders, "policy__clip_fraction": lambda part: 0.05}, "not the cause"),
        ({"score__mean": wanders, "policy__clip_fraction": lambda part: 0.28}, "not the cause"),
        (USELESS_CRITIC | {"value__loss": lambda part: 0.4 * math.exp(-9 * part)}, "Raise the value model's"),
        (USELESS_CRITIC | {"value__loss": lambda part: 96 * math.exp(-9 * part)}, "lower ppo.value_optimizer"),
        ({"response__finished_fraction": lambda part: 0.0}, "eos_token"),
        ({"response__finished_fraction": lambda part: 1 - part}, "no longer ends"),
        ({"response__finished_fraction": lambda part: 0.4 * (1 - part)}, "no longer ends"),
    ],
)
def test_advice_looks_at_what_else_the_run_says(curves, words):
    assert words in advice_of(ppo_run(**curves))


@pytest.mark.parametrize(("trainer", "loss"), [(SFT, "sft/loss"), (REWARD, "reward_model/loss"), (DPO, "dpo/loss")])
def test_a_loss_that_leaps_names_the_step(trainer, loss):
    values = [3.0] * 8 + [9.0] * 4 + [5.0] * 8
    lines = tuple({"step": step, loss: value} for step, value in enumerate(values, 1))
    (alarm,) = find_alarms(Run(name="run", lines=lines), trainer.metrics.rules)
    assert alarm.title == "The training loss jumped"
    assert " at step 9," in alarm.detail
    one_odd_batch = tuple({"step": step, loss: 9.0 if step == 9 else 3.0} for step in range(1, 21))
    assert find_alarms(Run(name="run", lines=one_odd_batch), trainer.metrics.rules) == ()
    rng = random.Random(3)
    for noise in (0.05, 2.0):  # batches of many examples, and of one
        level = tuple({"step": step, loss: abs(3 + rng.gauss(0, noise))} for step in range(200))
        assert find_alarms(Run(name="run", lines=level), trainer.metrics.rules) == ()


def test_a_loss_that_falls_from_a_random_start_and_leaps_from_there_is_found():
    """Losses of a small model with a learning rate of 0.3, a hundred times the right one."""
    values = [5.67, 4.3, 2.73, 3.33, 4.05, 4.56, 5.19, 4.46, 4.66, 4.11, 3.85, 2.77, *[2.5, 2.45] * 30]
    lines = tuple({"step": step, "sft/loss": value} for step, value in enumerate(values, 1))
    (alarm,) = find_alarms(Run(name="run", lines=lines), SFT.metrics.rules)
    assert alarm.title == "The training loss jumped"


def test_a_reward_model_that_learns_nothing_at_all_is_advised_on_its_learning_rate():
    flat = {"evaluation/pair_accuracy": 0.54, "reward_model/pair_accuracy": 0.51, "reward_model/loss": 0.69}
    lines = tuple({"step": step} | flat for step in range(20))
    settings = {"reward": {"optimizer": {"learning_rate": 0.1}}}
    (alarm,) = find_alarms(Run(name="run", lines=lines, config=settings), REWARD.metrics.rules)
    assert "reward.optimizer.learning_rate, now 0.1, is far too high" in alarm.advice
    by_heart = tuple(line | {"reward_model/pair_accuracy": 0.64} for line in lines)
    (alarm,) = find_alarms(Run(name="run", lines=by_heart, config=settings), REWARD.metrics.rules)
    assert "swapped" in alarm.advice
    assert "learning_rate" not in alarm.advice


@pytest.mark.parametrize("score", [1e300, -1e300])
def test_numbers_at_the_end_of_the_floats_stop_no_run(score):
    curves = {name: lambda part: abs(score) for name in ("score__std", "value__loss")}
    curves |= {
        "score__mean": lambda part: score,
        "kl__k3_per_token": lambda part: -1e-9,
        "value__explained_variance": lambda part: 0.0,
    }
    assert "The score does not rise" in titles(ppo_run(**curves))
