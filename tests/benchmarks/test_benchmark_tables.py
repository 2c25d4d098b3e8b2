"""The tables of the benchmarks: from measured seconds to the ratios that are quoted."""

from dataclasses import asdict

import pytest
import time_to_reward
from compare import check_lengths
from floor import Lengths, Rates, floor_seconds
from race import Settings, arrival
from sorting import digits_sorted, problems
from tables import rows
from work import Job

JOB = Job(models="", size="tiny", regime="eos", num_prompts=4, prompt_tokens=8, new_tokens=8)
SHAPES = ("128x128", "128x256")
RATES = {"seconds": {f"{kind} {shape}": 1e-6 for kind in ("decode", "forward", "backward") for shape in SHAPES}}


def side(*seconds: tuple[float, float, float]) -> dict:
    steps = [dict(zip(("rollout", "scoring", "training"), each, strict=True)) for each in seconds]
    return {"steps": [{**each, "lengths": JOB.response_lengths()} for each in steps], "peak_mib": 100.0}


def test_a_ratio_is_of_the_medians_of_whole_steps():
    taken = {
        "rates": {**RATES, "best": 1e9},
        "load": 0.0,
        "trl-1.12": side((2, 1, 2), (9, 9, 9), (1, 1, 2)),
        "proximo": side((1, 0.5, 0.5)),
    }
    found = {row[0]: row for row in rows({"job": asdict(JOB), "rounds": [taken]})}
    lengths = Lengths([len(prompt) for prompt in JOB.prompts()], JOB.response_lengths() or [])
    floor = sum(floor_seconds(JOB, lengths, Rates(**RATES, best=1e9)).values())
    assert list(found) == ["floor", "proximo", "trl-1.12"]
    assert found["trl-1.12"][4:6] == ["5.00", f"{5 / floor:.2f}"]
    assert found["proximo"][6] == f"{sum(lengths.responses):.0f}"
    assert [found[name][-1] for name in ("proximo", "trl-1.12")] == ["1.00", "2.50"]


def test_a_phase_that_a_side_does_not_tell_apart_is_left_blank():
    joined = side((1, 3, 2))
    del joined["steps"][0]["rollout"]
    taken = {"rates": {**RATES, "best": 1e9}, "load": 0.0, "proximo": side((1, 1, 1)), "trl-1.12": joined}
    (found,) = (row for row in rows({"job": asdict(JOB), "rounds": [taken]}) if row[0] == "trl-1.12")
    assert found[1:5] == ["", "3.00", "2.00", "5.00"]
    assert found[6] == ""


def test_a_side_that_wrote_other_lengths_is_refused():
    check_lengths(JOB, side((1, 1, 1)), side="proximo")
    other = side((1, 1, 1))
    other["steps"][0]["lengths"][0] += 1
    with pytest.raises(SystemExit, match="trl-1.12 wrote responses"):
        check_lengths(JOB, other, side="trl-1.12")


def test_a_score_is_reached_where_three_steps_in_a_row_have_it_on_average():
    assert arrival([9.0, 0.0, 0.0, 1.0, 2.0, 3.0], 2.0) == 2  # 9, 0 and 0 are 3 on average
    assert arrival([0.0, 0.0, 0.0, 1.0, 2.0, 3.0], 2.0) == 5
    assert arrival([9.0, 9.0], 2.0) is None
    assert arrival([0.0, 0.0, 5.0, 0.0], 2.0) is None


def test_seconds_to_a_reward_are_compared_with_those_of_the_best_settings_of_proximo(capsys):
    def run(name: str, seconds: float, *, reached: bool = True, batch: int = 64) -> dict:
        chosen = asdict(Settings(batch, 16, 1, 1e-3, 1e-3))
        scores = [0.0, 1.0, 2.0 if reached else 0.0]
        known = {"cpu_seconds": 5.0, "kl": 0.25}
        steps = [{**known, "seconds": seconds * part / 3, "score": score} for part, score in enumerate(scores, start=1)]
        return {"task": "digits", "side": name, "settings": chosen, "target": 1.0, "steps": steps}

    runs = [run("proximo", 10), run("proximo", 20), run("proximo", 40), run("trl-1.12", 70), run("trl-1.12", 70)]
    time_to_reward.print_table({str(number): each for number, each in enumerate(runs)})
    ours, peer = capsys.readouterr().out.splitlines()[-2:]
    assert ours.endswith("| 3 of 3 | 3 | 0.25 | 20 (10 to 40) | 5 | 1.00 |")
    assert peer.endswith("| 2 of 2 | 3 | 0.25 | 70 (70 to 70) | 5 | 3.50 |")
    slower = [run("proximo", 50, batch=32), run("proximo", 1, batch=16), run("proximo", 1, batch=16, reached=False)]
    time_to_reward.print_table({str(number): each for number, each in enumerate([*runs, *slower])})
    assert [line.split("|")[-2].strip() for line in capsys.readouterr().out.splitlines()[2:]] == [
        "1.00",
        "3.50",
        "2.50",
        "",
    ]
    time_to_reward.print_table({"a": run("proximo", 10), "b": run("trl-1.12", 70, reached=False)})
    assert capsys.readouterr().out.splitlines()[-1].endswith("| 0 of 1 |  |  |  |  |  |")


def test_the_rule_that_judges_digits_reads_the_answer_from_the_prompt():
    for problem in problems(20, seed=5):
        assert digits_sorted(problem["prompt"]) == problem["answer"]
