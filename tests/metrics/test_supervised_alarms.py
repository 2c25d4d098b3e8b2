"""Alarms about SFT, reward model, DPO and KTO: a share is judged by how many rows it is of, and never early."""

import json
from typing import Any

import pytest

from proximo.metrics.alarms import Alarm, find_alarms
from proximo.metrics.run_files import Run, read_run
from proximo.ppo.kind import PPO
from proximo.supervised.kinds import DPO, KTO, REWARD, SFT
from proximo.trainer_kinds import TrainerKind

GAP = "Accuracy is much higher in training than held out"
COIN = {
    REWARD: "The reward model is no better than chance",
    DPO: "The policy ranks held-out pairs no better than chance",
    KTO: "The policy tells held-out answers apart no better than chance",
}
ACCURACY = {REWARD: "reward_model/pair_accuracy", DPO: "dpo/accuracy", KTO: "kto/auc"}
OF_KTO = {
    "evaluation/pair_accuracy": "evaluation/auc",
    "evaluation/logprob_chosen": "evaluation/logprob_desirable",
}
PAIRS_PER_STEP = 16


def pair_run(
    trainer: TrainerKind,
    *,
    training: float,
    evaluations: dict[int, dict[str, float]],
    num_steps: int = 100,
    total_steps: int = 100,
    held_out_pairs: int = 400,
) -> Run:
    """A run whose training pairs are right in the share `training` from the first step on."""
    accuracy = ACCURACY[trainer]
    rows = "examples" if trainer is KTO else "pairs"
    counts = f"{accuracy.partition('/')[0]}/{rows}"
    lines = []
    for step in range(num_steps + 1):
        line: dict[str, float] = {"step": step}
        if step:
            line |= {accuracy: training, counts: PAIRS_PER_STEP}
        if step in evaluations:
            names = OF_KTO if trainer is KTO else {}
            line |= {f"evaluation/{rows}": held_out_pairs}
            line |= {names.get(name, name): value for name, value in evaluations[step].items()}
        lines.append(line)
    return Run(name="run", lines=tuple(lines), total_steps=total_steps)


def held_out(**numbers: float) -> dict[str, float]:
    return {f"evaluation/{name}": number for name, number in numbers.items()}


def alarms(run: Run, trainer: TrainerKind) -> tuple[Alarm, ...]:
    return find_alarms(run, trainer.metrics.rules)


def titles(run: Run, trainer: TrainerKind) -> list[str]:
    return [alarm.title for alarm in alarms(run, trainer)]


@pytest.mark.parametrize("trainer", COIN)
@pytest.mark.parametrize("evaluated", [(0,), (0, 100)])
def test_an_evaluation_of_the_first_half_says_nothing_of_a_later_step(trainer, evaluated):
    """As in the demo, which evaluates at both ends alone, and has learned a little by step 200."""
    early = {step: held_out(pair_accuracy=0.47, calibration_error=0.3, loss=0.7) for step in evaluated}
    run = pair_run(trainer, training=0.65, evaluations=early, num_steps=200, total_steps=750)
    assert titles(run, trainer) == []


@pytest.mark.parametrize("trainer", COIN)
@pytest.mark.parametrize(("step", "raised"), [(49, False), (50, True), (100, True)])
def test_an_evaluation_is_held_against_the_training_pairs_before_it(trainer, step, raised):
    run = pair_run(trainer, training=0.95, evaluations={step: held_out(pair_accuracy=0.7)}, num_steps=step)
    assert titles(run, trainer) == ([GAP] if raised else [])
    later = [line if line["step"] <= step else line | {ACCURACY[trainer]: 0.5} for line in run.lines]
    assert titles(Run(name="run", lines=tuple(later), total_steps=100), trainer) == ([GAP] if raised else [])


@pytest.mark.parametrize("trainer", COIN)
@pytest.mark.parametrize(
    ("held", "pairs", "raised"),
    [
        # Of 400 and 320 pairs three standard errors are 0.08, so that 0.15 decides; of 20 they are 0.30, of 40 0.22.
        *((0.70, 400, True), (0.76, 400, False)),
        *((0.70, 20, False), (0.55, 20, True)),
        *((0.70, 40, False), (0.66, 40, True)),
    ],
)
def test_a_gap_counts_beyond_what_so_many_pairs_show_by_chance(trainer, held, pairs, raised):
    evaluations = {100: held_out(pair_accuracy=held)}
    run = pair_run(trainer, training=0.9, evaluations=evaluations, held_out_pairs=pairs)
    assert titles(run, trainer) == ([GAP] if raised else [])


def test_a_gap_is_told_with_the_pairs_and_the_step():
    evaluations = {100: held_out(pair_accuracy=0.7)}
    (alarm,) = alarms(pair_run(REWARD, training=0.9, evaluations=evaluations), REWARD)
    assert alarm.detail == "90.0% in training, 70.0% of 400 held-out pairs at step 100."


def test_a_coin_among_labels_is_told_with_the_answers_and_advises_on_the_rate():
    evaluations = {100: held_out(pair_accuracy=0.51)}
    run = pair_run(KTO, training=0.52, evaluations=evaluations)
    config = {"kto": {"optimizer": {"learning_rate": 1e-9}}}
    (alarm,) = alarms(Run(name="run", lines=run.lines, total_steps=100, config=config), KTO)
    assert alarm.detail == (
        "51.0% of the pairs among 400 held-out examples are ranked correctly at step 100, and 52.0% of the pairs among "
        "training examples."
    )
    assert (
        "kto.optimizer.learning_rate, now 1e-09, is far too high or too low, or the labels are swapped" in alarm.advice
    )


def label_run(fractions: list[float], *, size: int = 32, **weights: float) -> Run:
    lines = [
        {"step": step, "kto/desirable_fraction": fraction, "kto/examples": size}
        for step, fraction in enumerate(fractions, start=1)
    ]
    return Run(name="run", lines=tuple(lines), config={"kto": weights})


@pytest.mark.parametrize(
    ("fractions", "size", "weights", "raised"),
    [
        ([0.5] * 8, 32, {}, False),
        ([0.25, 0.5] * 8, 32, {}, False),  # 3 to 5
        ([0.3] * 8, 32, {}, True),  # 3 to 7
        ([0.72] * 8, 32, {}, False),  # 2.57 to 1
        ([0.75] * 8, 32, {}, True),  # 3 to 1
        ([0.75] * 8, 32, {"undesirable_weight": 3.0}, False),
        ([0.5] * 8, 32, {"desirable_weight": 3.0, "undesirable_weight": 1.0}, True),
        ([1.0] * 8, 32, {}, True),
        ([0.9] * 8, 12, {}, False),  # 96 answers
    ],
)
def test_a_label_that_outweighs_the_other_is_an_alarm(fractions, size, weights, raised):
    found = titles(label_run(fractions, size=size, **weights), KTO)
    assert found == (["One label outweighs the other"] if raised else [])


def test_the_balance_is_told_with_the_weights_counted():
    (alarm,) = alarms(label_run([0.9] * 8, undesirable_weight=0.5), KTO)
    assert alarm.detail == "90.0% of the answers are desirable; by weight they are 18.0 to 1."


@pytest.mark.parametrize(("last", "raised"), [(-50.0, False), (-50.1, True)])
def test_desirable_answers_that_become_unlikely_are_an_alarm(last, raised):
    evaluations = {step: {"evaluation/logprob_desirable": value} for step, value in ((0, -40.0), (100, last))}
    found = titles(pair_run(KTO, training=0.8, evaluations=evaluations), KTO)
    assert found == (["The desirable answers become much less likely"] if raised else [])


@pytest.mark.parametrize("trainer", COIN)
@pytest.mark.parametrize(
    ("training", "pairs", "raised"),
    [(0.7, 400, True), (0.7, 100, True), (0.66, 99, False), (0.61, 40, False), (0.59, 40, True)],
)
def test_few_held_out_pairs_cannot_tell_a_coin_from_a_model_that_learns(trainer, training, pairs, raised):
    evaluations = {100: held_out(pair_accuracy=0.52)}
    run = pair_run(trainer, training=training, evaluations=evaluations, held_out_pairs=pairs)
    assert titles(run, trainer) == ([COIN[trainer]] if raised else [])


@pytest.mark.parametrize("trainer", COIN)
def test_labels_learned_one_by_one_are_one_alarm(trainer):
    evaluations = {
        step: held_out(pair_accuracy=0.5, calibration_error=0.4, loss=0.7 + step / 50, logprob_chosen=-40 - step / 2)
        for step in (0, 50, 100)
    }
    (alarm,) = alarms(pair_run(trainer, training=1.0, evaluations=evaluations), trainer)
    assert alarm.title == COIN[trainer]
    assert GAP in [each.title for each in alarm.consequences]
    assert "The held-out loss rises again" in [each.title for each in alarm.consequences]


@pytest.mark.parametrize(("error", "pairs", "raised"), [(0.2, 400, True), (0.2, 100, False), (0.26, 100, True)])
def test_the_bins_of_few_pairs_are_noisy(error, pairs, raised):
    evaluations = {100: held_out(pair_accuracy=0.8, calibration_error=error)}
    run = pair_run(REWARD, training=0.82, evaluations=evaluations, held_out_pairs=pairs)
    assert titles(run, REWARD) == (["The reward model is overconfident"] if raised else [])


@pytest.mark.parametrize("trainer", COIN)
@pytest.mark.parametrize(("last", "pairs", "raised"), [(0.52, 400, False), (0.53, 400, True), (0.55, 50, False)])
def test_a_held_out_loss_of_pairs_must_rise_by_more_than_its_noise(trainer, last, pairs, raised):
    losses = {0: 0.693, 50: 0.5, 100: last}
    evaluations = {step: held_out(pair_accuracy=0.8, loss=loss) for step, loss in losses.items()}
    run = pair_run(trainer, training=0.82, evaluations=evaluations, held_out_pairs=pairs)
    assert titles(run, trainer) == (["The held-out loss rises again"] if raised else [])


def sft_run(training: list[float], evaluations: dict[int, float], *, total_steps: int = 100) -> Run:
    lines: list[dict[str, Any]] = [{"step": 0}, *({"step": n, "sft/loss": x} for n, x in enumerate(training, 1))]
    for step, loss in evaluations.items():
        lines[step]["evaluation/loss"] = loss
    return Run(name="run", lines=tuple(lines), total_steps=total_steps)


def wavy(level: float, slope: float = 0.0, num_steps: int = 100) -> list[float]:
    return [level + 0.05 * (-1) ** step - slope * step for step in range(num_steps)]


def test_a_loss_that_stands_still_is_said():
    (alarm,) = alarms(sft_run(wavy(2.0), {0: 2.0, 50: 1.999, 100: 1.998}), SFT)
    assert alarm.title == "The loss does not fall"
    assert alarm.detail == "The held-out loss was 2 before the first step and is 1.998 at step 100."


@pytest.mark.parametrize(
    ("training", "evaluations"),
    [
        (wavy(2.0), {0: 2.0, 100: 1.95}),  # held out it falls
        (wavy(2.0, 0.002), {0: 2.0, 100: 2.0}),  # in training it falls
        (wavy(2.0), {0: 2.0}),  # nobody knows yet
        (wavy(2.0), {}),
        (wavy(2.0, num_steps=40), {0: 2.0, 40: 2.0}),  # less than half of the run
        (wavy(2.0), {0: 2.0, 30: 1.9, 100: 2.0}),  # it fell, and came back by less than 2%
    ],
)
def test_a_loss_that_falls_or_may_yet_fall_raises_no_alarm(training, evaluations):
    run = sft_run(training, evaluations)
    assert "The loss does not fall" not in titles(run, SFT)


@pytest.mark.parametrize("trainer", COIN)
@pytest.mark.parametrize(("moved", "first"), [(0.00003, "The loss does not fall"), (0.0001, "coin")])
def test_pairs_that_teach_nothing_are_told_from_steps_that_are_too_small(trainer, moved, first):
    """Labels that are noise leave the loss at 0.693 as well, but for what the updates make of them."""
    moved = moved / 5 if trainer is KTO else moved  # whose loss is bounded, and moves less
    losses = {0: 0.6931, 50: 0.6931 + moved, 100: 0.6931}
    evaluations = {step: held_out(pair_accuracy=0.5, loss=loss) for step, loss in losses.items()}
    run = pair_run(trainer, training=0.5, evaluations=evaluations)
    group = ACCURACY[trainer].partition("/")[0]
    lines = tuple(line | ({f"{group}/loss": 0.6931} if line["step"] else {}) for line in run.lines)
    found = titles(Run(name="run", lines=lines, total_steps=100), trainer)
    assert found == [COIN[trainer] if first == "coin" else first]


def test_the_steps_of_a_run_that_is_under_way_are_known_from_its_passes(tmp_path):
    """So that its report does not take what there is for the whole."""
    lines = [{"step": step, "sft/loss": 2.0, "progress/epoch": step / 40} for step in range(1, 31)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.resolved.json").write_text(json.dumps({"sft": {"num_epochs": 2.5}}))
    assert read_run(tmp_path).total_steps == 100
    (tmp_path / "config.resolved.json").write_text(json.dumps({"ppo": {"num_steps": 7}}))
    assert read_run(tmp_path).total_steps == 7
    (tmp_path / "config.resolved.json").unlink()
    assert read_run(tmp_path).total_steps is None


def test_a_held_out_loss_that_never_fell_is_not_called_learning_by_heart():
    (alarm,) = alarms(sft_run(wavy(2.0, 0.004), {0: 1.0, 50: 1.1, 100: 1.2}), SFT)
    assert alarm.title == "The held-out loss rises again"
    assert "never lower" in alarm.detail
    assert "lower the learning rate" in alarm.advice


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({0: 2, 1: 1, 9: 14}, "Responses: 17, in the evaluation before the first step and in 2 of 18 steps."),
        ({3: 17}, "Responses: 17, in 1 of 18 steps."),
        ({0: 1}, "Responses: 1, in the evaluation before the first step."),
    ],
)
def test_counts_know_that_step_0_is_no_step(counts, words):
    lines = [{"step": step, "score/mean": float(step)} for step in range(19)]
    for step, count in counts.items():
        lines[step]["response/unscored" if step else "evaluation/unscored"] = count
    (alarm,) = find_alarms(Run(name="run", lines=tuple(lines)), PPO.metrics.rules)
    assert alarm.detail == words


@pytest.mark.parametrize("trainer", [SFT, REWARD, DPO, KTO])
def test_a_learning_rate_that_no_model_survives_is_not_taken_for_one_that_is_too_low(trainer: TrainerKind) -> None:
    """After it the loss of a language model is that of a uniform guess, and stays there."""
    loss = "reward_model/loss" if trainer is REWARD else f"{trainer.name}/loss"
    lines = tuple({"step": step, loss: 5.58, "evaluation/loss": 5.58} for step in range(30))
    config = {trainer.name: {"optimizer": {"learning_rate": 1e6}}}
    (alarm,) = find_alarms(Run(name="run", lines=lines, config=config, total_steps=29), trainer.metrics.rules)
    assert alarm.title == "The learning rate is far too high"
    assert alarm.detail == f"{trainer.name}.optimizer.learning_rate is 1e+06."
