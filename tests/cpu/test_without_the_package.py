"""Proximo without the package proximo_cpu trains, samples, saves, resumes and examines the machine as with kernels off.

The layers run as the modules of transformers then. With kernels off torch's operators run them fused, so that last bits
differ.
"""

import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from runs_of_a_process import run_all
from test_library import forget

from proximo.metrics.catalogue import catalogue
from run_outcomes import outcome, read_lines
from tiny_runs import make_inputs

PROGRAM = Path(__file__).with_name("runs_of_a_process.py")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """The folder of the runs and what was printed, without the package and, in this process, with its kernels off."""
    inputs, without, off = (tmp_path_factory.mktemp(name) for name in ("inputs", "without", "off"))
    make_inputs(inputs)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.setenv("PROXIMO_KERNELS", "off")
        forget()
        run_all(inputs, off, hidden=False)
        paths = [str(PROGRAM.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        command = [sys.executable, PROGRAM, inputs, without]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    forget()
    assert done.returncode == 0, done.stdout + done.stderr
    return {"without": (without, done.stdout), "with": (off, printed.getvalue())}


@pytest.mark.parametrize("name", ["sft", "whole"])
def test_training_gives_the_numbers_of_a_run_with_kernels_off(runs, name: str) -> None:
    without, off = (read_lines(runs[which][0] / name / "metrics.jsonl") for which in ("without", "with"))
    for mine, other in zip(without, off, strict=True):
        assert catalogue().repeatable(mine) == pytest.approx(catalogue().repeatable(other), rel=1e-4, abs=1e-5)


def test_the_same_tokens_are_sampled_in_training(runs) -> None:
    without, off = (
        [line["response"] for line in read_lines(runs[which][0] / "whole" / "samples.jsonl")]
        for which in ("without", "with")
    )
    assert without == off
    assert without


def test_a_run_that_failed_is_resumed_to_the_same_bits(runs) -> None:
    whole, resumed = (outcome(runs["without"][0] / name) for name in ("whole", "resumed"))
    computed = [name for name in whole if name.endswith(".safetensors") or name.startswith("metrics of step")]
    assert len(computed) > 6
    assert {name: resumed[name] for name in computed} == {name: whole[name] for name in computed}


def test_the_record_and_the_doctor_say_that_there_are_no_kernels(runs) -> None:
    folder, printed = runs["without"]
    assert "no kernels for a cpu: the package proximo_cpu is not installed, so torch's operators run" in printed
    assert "no kernels in C: PROXIMO_KERNELS is off" in runs["with"][1]
    for which in runs:
        environment = json.loads((runs[which][0] / "whole" / "environment.json").read_text(encoding="utf-8"))
        assert environment["kernels"] is None
    assert "no kernels for a cpu" in (folder / "whole" / "log.txt").read_text(encoding="utf-8")
