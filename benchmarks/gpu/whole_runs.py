"""Sections that start whole runs by the command: a pipeline, a run that is killed and resumed, ranks, the tests."""

import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from gpu.bench import ROOT, Bench, brief, environment
from safetensors.torch import load_file


def real_runs(bench: Bench) -> dict[str, Any]:
    """The shipped pipeline `tiny` in bf16; then its PPO three times at once, one of them killed: the same bits?"""
    base = _pipeline(bench)
    steps = 6 if bench.smoke else 12
    folders = {name: bench.work / name for name in ("whole", "again", "killed")}

    def arguments(name: str) -> list[str | Path]:
        more = [f"run.folder={folders[name]}", f"ppo.num_steps={steps}", "run.save_every_steps=2"]
        return ["ppo", base / "ppo" / "config.resolved.json", *_on(bench), *more]

    def whole(name: str) -> dict[str, Any]:
        return bench.proximo(*arguments(name), seconds=bench.section_left())

    def killed() -> tuple[int | None, dict[str, Any]]:
        reached = _kill_after(bench, arguments("killed"), folders["killed"] / "metrics.jsonl", steps=steps // 2)
        return reached, bench.proximo(*arguments("killed"), "--resume=auto", seconds=bench.section_left())

    with ThreadPoolExecutor(3) as pool:
        waiting = {name: pool.submit(whole, name) for name in ("whole", "again")}
        last = pool.submit(killed)
        runs = {name: each.result() for name, each in waiting.items()}
        reached, runs["killed"] = last.result()
    bench.hold(reached is not None, "the run that was to be killed had ended before")
    for name, done in runs.items():
        bench.hold(done["status"] == 0, f"the run {name} ended with status {done['status']}")
    found: dict[str, Any] = {f"{name}_run": brief(done) for name, done in runs.items()}
    found["killed_after_steps"] = reached
    for name, words in (("again", "a second uninterrupted run"), ("killed", "the run that was killed and resumed")):
        bits = found[f"{name}_bits"] = same_bits(folders["whole"], folders[name])
        bench.hold(bits["compared"] > 0, f"{words} has no weights to compare")
        bench.hold(not bits["differing"], f"{words} has other bits in {bits['differing']} tensors")
    return found


def ranks(bench: Bench) -> dict[str, Any]:
    """A world of one with each way of sharding, by torchrun too, and models that wait on the host."""
    base = _pipeline(bench)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "proximo"]
    plain = [sys.executable, "-m", "proximo"]
    cases = {
        "one_rank_full": (plain, ["devices.num=1", "devices.shard=full"]),
        "one_rank_replicate": (plain, ["devices.num=1", "devices.shard=replicate"]),
        "offload_idle": (plain, ["devices.reward.offload=idle", "devices.reference.offload=idle"]),
        "torchrun_one": (torchrun, ["devices.shard=full"]),
    }
    found = {}
    for name, (command, more) in cases.items():
        recipe = ["ppo", base / "ppo" / "config.resolved.json", f"run.folder={bench.work / name}", "ppo.num_steps=2"]
        done = bench.process([*command, *recipe, *_on(bench), *more], seconds=60)
        bench.hold(done["status"] == 0, f"{name} ended with status {done['status']}")
        found[name] = brief(done)
    return found


def project_tests(bench: Bench) -> dict[str, Any]:
    """The project's own tests that need an accelerator (mark `gpu`)."""
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *files, "-W", "default", "--no-header", "-rs"]
    done = bench.process(command, seconds=85)
    bench.hold(done["status"] == 0, f"pytest ended with status {done['status']}")
    return {"seconds": done["seconds"], "said": done["said"]}


def _on(bench: Bench) -> list[str]:
    return [f"run.device={bench.device}", "run.precision=bf16"]


def _pipeline(bench: Bench) -> Path:
    """The folder of the shipped pipeline `tiny`, run once. Raises RuntimeError with the end of what it said."""
    base = bench.work / "pipeline"
    if not (base / "ppo" / "config.resolved.json").is_file():
        done = bench.proximo("pipeline", "tiny", f"run.folder={base}", *_on(bench), "--overwrite", seconds=100)
        if done["status"] != 0:
            raise RuntimeError(f"the pipeline ended with status {done['status']}:\n{done['said'][-2000:]}")
    return base


def _kill_after(bench: Bench, arguments: Sequence[str | Path], metrics: Path, *, steps: int) -> int | None:
    """Start the command and kill it when so many steps are written down; how many were. None where it ended before."""
    command = [sys.executable, "-m", "proximo", *map(str, arguments)]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), **quiet)
    deadline = time.time() + bench.section_left()
    while process.poll() is None and time.time() < deadline and _lines(metrics) < steps:
        time.sleep(0.02)
    running = process.poll() is None
    process.kill()
    process.wait()
    return _lines(metrics) if running else None


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.is_file() else 0


def same_bits(one: Path, other: Path) -> dict[str, Any]:
    """Of the weights of two run folders, in all files that both have: how many tensors, and how many differ."""
    names = [path.relative_to(one) for path in sorted(one.rglob("*.safetensors"))]
    compared, differing = 0, []
    for name in (name for name in names if (other / name).is_file()):
        ours, theirs = load_file(one / name), load_file(other / name)
        compared += len(ours)
        differing += [f"{name}:{key}" for key in ours if key not in theirs or not torch.equal(ours[key], theirs[key])]
    return {"compared": compared, "differing": len(differing), "first": differing[:2]}
