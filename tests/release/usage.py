"""Uses an installed Proximo as its users do, without a compiler and without a network: for the check of a release."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from running import ALONE, LOOPBACK, Deadline, Failed, run

TESTS = (
    *("tests/algorithms", "tests/config", "tests/data", "tests/learner"),
    *("tests/checkpoint/test_store.py", "tests/checkpoint/test_tensors.py", "tests/checkpoint/test_interruption.py"),
    # What torch, transformers, peft, tokenizers and matplotlib decide.
    *(f"tests/models/test_{part}.py" for part in ("parity", "loading", "lora", "saving", "scalar", "sharing")),
    # What torch's kernels for CUDA are given, without a device.
    *(f"tests/models/test_{part}.py" for part in ("fake_cuda", "products", "shared_prefixes")),
    "tests/commands/test_planning.py",
    *("tests/rollout/test_local.py", "tests/rollout/test_engine_architectures.py", "tests/run/test_sinks.py"),
    *("tests/metrics/test_report.py", "tests/metrics/test_plots.py", "tests/metrics/test_tensorboard_sink.py"),
    # Whole runs: of each kind, killed and resumed, in a pipeline, from Python.
    *("tests/ppo/test_ppo_run.py", "tests/supervised/test_supervised.py", "tests/resume/test_kills.py"),
    *("tests/commands/test_pipeline.py", "tests/commands/test_training_from_python.py", "tests/test_api.py"),
)
"""Those that reach into every kind of dependency, in a few minutes."""
SAVED = Path("ppo/checkpoints/step-000001/manifest.json")
"""What a pipeline's folder has when its last stage can be resumed."""
WEIGHTS = "ppo/checkpoints/step-000006/policy/model.safetensors"
TINY = ("pipeline", "tiny", "ppo.run.save_every_steps=1", "ppo.ppo.num_steps=6")
COMPILERS = ("cc", "gcc", "clang", "c++", "g++")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many tests passed, and how many were skipped."""

    passed: int
    skipped: int


def use(programs: Path, place: Path, *, demo: bool, deadline: Deadline) -> None:
    """The command and the library: doctor, import, a pipeline, a kill and a resume; `demo` adds the embedded example.

    Raises Failed.
    """
    clean = _clean(programs, place)
    alone = _alone()
    proximo = [*alone, programs / "proximo"]
    run([*proximo, "--help"], cwd=place, deadline=deadline, environment=clean)
    said = run([*proximo, "doctor"], cwd=place, deadline=deadline, environment=clean)
    if "torch" not in said:
        raise Failed(f"proximo doctor names no torch:\n{said}")
    library = "import proximo; proximo.PPOTrainer"
    run([*alone, programs / "python", "-c", library], cwd=place, deadline=deadline, environment=clean)
    run([*proximo, *TINY, "run.folder=whole"], cwd=place, deadline=deadline, environment=clean)
    kill_once([*proximo, *TINY, "run.folder=killed"], folder=place / "killed", deadline=deadline, environment=clean)
    resume = [*proximo, *TINY, "run.folder=killed", "--resume"]
    run(resume, cwd=place, deadline=deadline, environment=clean)
    if (place / "whole" / WEIGHTS).read_bytes() != (place / "killed" / WEIGHTS).read_bytes():
        raise Failed("a run that was killed and resumed ended with other weights")
    if demo:
        run([*proximo, "pipeline", "demo"], cwd=place, deadline=deadline, environment=clean)


def kill_once(
    command: Sequence[str | Path], *, folder: Path, deadline: Deadline, environment: Mapping[str, str]
) -> None:
    """Start a pipeline in `folder`, and kill it as soon as its last stage has a checkpoint. Raises Failed."""
    with open(folder.with_name("killed.txt"), "wb") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=folder.parent,
            env=dict(environment),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        while not (folder / SAVED).exists() and process.poll() is None and deadline.seconds_left:
            time.sleep(0.002)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
    if status != -signal.SIGKILL or not (folder / SAVED).exists():
        raise Failed(f"the run to be killed ended by itself (exit status {status}): {output.name} has its output")


def tests(programs: Path, source: Path, place: Path, *, deadline: Deadline) -> Outcome:
    """The tests of the unpacked source, against the installed package. Raises Failed."""
    command = [*_alone(), programs / "python", "-c", LOOPBACK, programs / "python", "-m", "pytest"]
    command += ["-q", "-n", "2", "-m", "not soak", *TESTS]
    command += [f"--junit-xml={place / 'tests.xml'}"]
    said = run(command, cwd=source, deadline=deadline, environment=_clean(programs, place))
    passed, skipped = (re.search(rf"(\d+) {word}", said.splitlines()[-1]) for word in ("passed", "skipped"))
    if passed is None:
        raise Failed(f"no test ran:\n{said[-1000:]}")
    return Outcome(passed=int(passed[1]), skipped=int(skipped[1]) if skipped else 0)


def _alone() -> list[str]:
    unshare = shutil.which(ALONE[0])
    if unshare is None:
        raise Failed(f"{ALONE[0]} is not installed")
    return [unshare, *ALONE[1:]]


def _clean(programs: Path, place: Path) -> dict[str, str]:
    """Variables of a process that finds the environment's programs, and no compiler. Raises Failed if it finds one."""
    compilers = [name for name in COMPILERS if shutil.which(name, path=str(programs))]
    if compilers:
        raise Failed(f"{programs} has {', '.join(compilers)}: the check is of machines without a compiler")
    return {"PATH": str(programs), "HOME": str(place), "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}
