"""The GPU check: what it computes, its exit status, and its sections on a CPU with tiny sizes."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from floor import Lengths, training_flops
from gpu import bench as benches
from gpu import beside_peers, check, floors, whole_runs
from gpu.bench import Bench, CannotRun, TooLong
from gpu.outcomes import run_section
from safetensors.torch import save_file
from stopwatch import PHASES
from work import SIZES, Job, make_models

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"
TINY = SIZES["tiny-qwen"]


def ran(*arguments: str, script: Path = FOLDER / "check.py") -> subprocess.CompletedProcess[str]:
    """The check in a process of its own, with this tree's sources."""
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=3000)


def main_with(monkeypatch: pytest.MonkeyPatch, folder: Path, *sections: Any, arguments: tuple[str, ...] = ()) -> int:
    """The exit status of the check with these sections for its own."""
    monkeypatch.setattr(check, "SECTIONS", dict.fromkeys(sections, 10))
    monkeypatch.setattr(sys, "argv", ["check.py", "--device", "cpu", "--smoke", "--out", str(folder), *arguments])
    return check.main()


def found(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "gpu.json").read_text())


def fine(bench: Bench) -> dict[str, Any]:
    return {"device": bench.device}


def breaks(bench: Bench) -> dict[str, Any]:
    raise RuntimeError("the device is on fire")


def off(bench: Bench) -> dict[str, Any]:
    bench.hold(1 + 1 == 3, "1 + 1 is 2, not 3")
    bench.hold(1 + 1 == 2, "1 + 1 is not 2")
    return {"sum": 2}


def absent(bench: Bench) -> dict[str, Any]:
    raise CannotRun("needs a tape drive")


def half(bench: Bench) -> dict[str, Any]:
    rows = [bench.case({"case": "bad"}, lambda: breaks(bench)), bench.case({"case": "good"}, lambda: {"sum": 2})]
    return {"rows": rows}


def test_two_sections_run_on_a_cpu_by_a_copy_of_the_script_in_the_root_of_a_checkout(tmp_path: Path) -> None:
    (tmp_path / "wheels" / "here").mkdir(parents=True)
    copy = Path(shutil.copy(FOLDER / "check.py", tmp_path / "wheels" / "here" / "copied.py"))
    asked = ("--device", "cpu", "--smoke", "--only", "correctness,training_speed", "--out", str(tmp_path))
    done = ran(*asked, script=copy)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {name: section["status"] for name, section in found(tmp_path).items()} == {
        "environment": "ok",
        "correctness": "ok",
        "training_speed": "ok",
    }
    assert len(found(tmp_path)["correctness"]["found"]["rows"]) == 2 * 5
    assert done.stdout.rstrip().endswith("failed: none\nskipped: none")


@pytest.mark.soak
def test_all_sections_run_on_a_cpu(tmp_path: Path) -> None:
    done = ran("--device", "cpu", "--smoke", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    skipped = {name: section["reason"] for name, section in found(tmp_path).items() if section["status"] == "skipped"}
    assert list(found(tmp_path)) == [section.__name__ for section in check.SECTIONS]
    assert skipped.keys() <= {"attention", "fused_sampler", "compiled", "peers_trl"}
    assert skipped["attention"] == "needs CUDA"


def test_a_section_that_raises_gives_status_1_and_the_next_goes_on(monkeypatch, tmp_path, capsys):
    assert main_with(monkeypatch, tmp_path, breaks, fine) == 1
    sections = found(tmp_path)
    assert sections["breaks"]["status"] == "failed"
    assert "RuntimeError: the device is on fire" in sections["breaks"]["reason"]
    assert sections["fine"]["found"] == {"device": "cpu"}
    assert "ok: fine\nfailed: breaks\nskipped: none" in capsys.readouterr().out


def test_a_number_that_does_not_hold_gives_status_1_and_stays_in_the_results(monkeypatch, tmp_path):
    assert main_with(monkeypatch, tmp_path, off) == 1
    section = found(tmp_path)["off"]
    assert (section["status"], section["wrong"], section["found"]) == ("failed", ["1 + 1 is 2, not 3"], {"sum": 2})


def test_a_case_that_raises_gives_status_1_and_the_next_case_goes_on(monkeypatch, tmp_path):
    assert main_with(monkeypatch, tmp_path, half) == 1
    section = found(tmp_path)["half"]
    assert section["wrong"] == ["bad: RuntimeError: the device is on fire"]
    bad, good = section["found"]["rows"]
    assert "on fire" in bad["failed"]
    assert good == {"case": "good", "sum": 2}


def test_what_was_skipped_is_named_with_the_reason_and_fails_nothing(monkeypatch, tmp_path, capsys):
    assert main_with(monkeypatch, tmp_path, absent, fine) == 0
    assert "skipped: absent (needs a tape drive)" in capsys.readouterr().out


def test_without_trl_its_section_is_skipped_with_the_reason(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(beside_peers.importlib.util, "find_spec", lambda name: None)
    assert main_with(monkeypatch, tmp_path, beside_peers.peers_trl) == 0
    assert "skipped: peers_trl (TRL is not installed in this Python" in capsys.readouterr().out


def test_a_section_that_catches_whatever_comes_is_still_cut_at_its_limit(tmp_path):
    def stubborn(bench: Bench) -> dict[str, Any]:
        while True:
            bench.case({}, lambda: {})

    outcome = run_section(stubborn, Bench(device="cpu", work=tmp_path), limit_seconds=0.2)
    assert outcome.status == "failed"
    assert "cut at its limit" in outcome.reason
    assert not issubclass(TooLong, Exception)


def test_when_the_budget_is_used_up_the_rest_is_skipped(tmp_path):
    outcome = run_section(fine, Bench(device="cpu", work=tmp_path, budget=0), limit_seconds=600)
    assert (outcome.status, outcome.reason) == ("skipped", "the budget is used up")


def test_an_unknown_section_is_an_error_with_status_2_that_names_those_there_are(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main_with(monkeypatch, tmp_path, fine, breaks, arguments=("--only", "fine,fire"))
    assert stopped.value.code == 2
    assert "there is no section fire; there are fine, breaks" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_machine_without_cuda_is_told_so_with_status_2(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["check.py"])
    assert check.main() == 2
    assert "needs a GPU with CUDA" in capsys.readouterr().err


def test_the_sections_are_listed_with_their_limits(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check.py", "--list"])
    assert not check.main()
    lines = [f"{each.__name__}: at most {s} s" for each, s in check.SECTIONS.items()]
    assert capsys.readouterr().out.splitlines() == lines


def test_every_section_has_its_row_on_the_page():
    page = (FOLDER / "README.md").read_text()
    assert not [each.__name__ for each in check.SECTIONS if f"`{each.__name__}`" not in page]


def test_wheels_are_pinned_and_with_what_the_page_expects_are_all_that_the_project_needs():
    def plain(name: str) -> str:
        return name.lower().replace("_", "-")

    carried = {plain(name) for name in (FOLDER / "wheels.txt").read_text().split()}
    pinned = {plain(line.partition("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert carried <= pinned
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    expected = (FOLDER / "README.md").read_text().partition("machine has torch")[2].partition("cannot reach")[0].lower()
    names = {plain(re.match(r"[\w.-]+", each)[0]) for each in needed} - {"torch"}
    assert not [name for name in names - carried if name not in expected]


def test_bits_that_differ_are_counted_by_tensor(tmp_path):
    for name, last in (("one", 3.0), ("other", 4.0)):
        (tmp_path / name / "policy").mkdir(parents=True)
        weights = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0, last])}
        save_file(weights, tmp_path / name / "policy" / "model.safetensors")
    bits = whole_runs.same_bits(tmp_path / "one", tmp_path / "other")
    assert bits == {"compared": 2, "differing": 1, "first": ["policy/model.safetensors:b"]}


def test_the_bytes_of_a_rollout_are_those_of_its_passes_one_by_one():
    lengths = Lengths(prompts=[3, 5], responses=[4, 2])
    weights = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 128) + 128 * 256
    read = 0
    for number in range(4):  # the pass that makes the token of this number
        read += weights
        for prompt, response in ((3, 4), (5, 2)):
            if 0 < number < response:
                read += (prompt + number) * 2 * TINY.layers * 64
    assert floors.decode_bytes(TINY, lengths) == 2 * read


def test_a_side_has_the_shares_of_what_bandwidth_and_products_allow():
    job = Job(models="", size="tiny-qwen", regime="none", num_prompts=2, prompt_tokens=8, new_tokens=6)
    lengths = Lengths([len(prompt) for prompt in job.prompts()], [6, 5])
    seconds = {"rollout": 2.0, "scoring": 1.0, "training": 4.0}
    rates = {
        "bytes_per_second": floors.decode_bytes(TINY, lengths),  # a floor of one second
        "bf16": training_flops(job, lengths) / 3,  # and of three
    }
    steps = [{**seconds, "lengths": [6, 5]}] * 2
    assert floors.shares(job, steps, rates) == pytest.approx(
        seconds
        | {
            "step": 7,
            "decode_tokens_per_second": 11 / 2,
            "share_of_bandwidth_floor": 1 / 2,
            "mfu": 3 / 4,
            "response_tokens": 11,
        }
    )


def test_a_copy_counts_what_is_read_and_what_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(Bench, "median_seconds", lambda bench, work, repeats: work() is None or 0.5)
    bench = Bench(device="cpu", work=tmp_path)
    assert floors.bandwidth(bench, num_bytes=100) == 400
    assert floors.product_rate(bench, torch.bfloat16, width=10) == 4000


def test_a_side_that_fails_is_named_with_the_end_of_what_it_said(monkeypatch, tmp_path):
    script = tmp_path / "side.py"
    script.write_text("print('loads')\nraise SystemExit('OutOfMemoryError: 40 GiB')\n")
    monkeypatch.setattr(beside_peers, "SIDES", {"trl": str(script)})
    bench = Bench(device="cpu", work=tmp_path, smoke=True)
    job = beside_peers.cases("qwen-0.5b", device="cpu")["qwen-0.5b-group"]
    row = beside_peers.side_row(bench, "group", "trl", job)
    assert (row["case"], row["side"], row["status"]) == ("group", "trl", 1)
    assert bench.wrong == ["group of trl: OutOfMemoryError: 40 GiB"]


def test_a_side_that_its_section_cuts_is_skipped_by_its_name(monkeypatch, tmp_path):
    script = tmp_path / "side.py"
    script.write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.setattr(beside_peers, "SIDES", {"trl": str(script)})
    monkeypatch.setattr(benches, "SMOKE_SECONDS", 0.5)
    bench = Bench(device="cpu", work=tmp_path, smoke=True)
    job = beside_peers.cases("qwen-0.5b", device="cpu")["qwen-0.5b-group"]
    assert beside_peers.side_row(bench, "group", "trl", job)["status"] == 124
    assert bench.wrong == []
    assert re.fullmatch(r"group of trl \(cut after \d+ s\)", bench.skipped[0])


@pytest.mark.parametrize("name", ["short", "batch", "ends", "group"])
def test_proximo_takes_a_step_of_each_case_in_bf16(name, tmp_path):
    from side_proximo import make_trainer

    job = beside_peers.cases("tiny-qwen", device="cpu", smoke=True)[f"tiny-qwen-{name}"]
    make_models(tmp_path, TINY, regime=job.regime, stop_probability=1 / 4)
    trainer, prompts = make_trainer(beside_peers.replace(job, models=str(tmp_path)))
    outcome = trainer.run_step(prompts=prompts)
    lengths = [len(scored.response.token_ids) for scored in outcome.experience.scored]
    assert len(lengths) == 4
    assert (min(lengths) < 8) == (name == "ends")
    step = dict.fromkeys(PHASES, 1.0) | {"lengths": lengths}
    assert floors.shares(job, [step], {"bytes_per_second": 1e9, "bf16": 1e9})["response_tokens"] == sum(lengths)
