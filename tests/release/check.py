"""Builds the package, and uses it as its users will: `make release-check PYTHONS="python3.11 python3.12"`.

For each Python there are two new environments, with the lowest and the highest versions that pyproject.toml allows. In
each, the command runs without a compiler and without a network, is killed, and resumes with the same bits; then the
tests of the unpacked source run. It needs uv, Linux and, to install, a network. uv's own variables choose where
packages come from: UV_TORCH_BACKEND=cpu, UV_FIND_LINKS, UV_CONSTRAINT. Environments are kept in build/release/.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESOLUTIONS = ("lowest-direct", "highest")
ALONE = ("unshare", "--map-root-user", "--net")
"""A command after these has no network, not even the loopback."""
TESTS = ("tests/algorithms", "tests/config", "tests/dataflow")
"""Those that take seconds, and reach into every kind of dependency but the models'."""
DEADLINE_SECONDS = 1200
SAVED = Path("ppo/checkpoints/step-000001/manifest.json")
"""What a pipeline's folder has when its last stage can be resumed."""
WEIGHTS = "ppo/checkpoints/step-000006/policy/model.safetensors"
TINY = ("pipeline", "tiny", "ppo.run.save_every_steps=1", "ppo.ppo.num_steps=6")


class Failed(Exception):
    """A command of the check failed. The message has its output."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check for the given interpreters. Exit status 1, and what failed, if anything did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", default=[sys.executable], help="interpreters; default this one")
    pythons = parser.parse_args(arguments).pythons
    missing = [name for name in ("uv", ALONE[0]) if shutil.which(name) is None]
    if missing:
        print(f"error: {' and '.join(missing)} must be installed to check a release", file=sys.stderr)
        return 2
    folder = ROOT / "build" / "release"
    shutil.rmtree(folder, ignore_errors=True)
    wheel, source = build(folder)
    print(f"built {wheel.name} and {source.name}", flush=True)
    failures = 0
    for python in pythons:
        for resolution in RESOLUTIONS:
            start = time.monotonic()
            place = folder / f"{Path(python).name}-{resolution}"
            try:
                said = check(python, resolution, wheel=wheel, source=source, place=place)
            except Failed as failure:
                failures += 1
                said = f"FAILED: {failure}"
            print(f"{python} {resolution}: {said} ({time.monotonic() - start:.0f} s)", flush=True)
    return int(failures > 0)


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel and the unpacked source. The wheel is built from the source distribution, so that one is whole."""
    run(["uv", "build", "--quiet", "--out-dir", folder / "dist", ROOT], cwd=ROOT)
    (wheel,) = (folder / "dist").glob("*.whl")
    (archive,) = (folder / "dist").glob("*.tar.gz")
    run(["uvx", "twine", "check", "--strict", wheel, archive], cwd=ROOT)
    with tarfile.open(archive) as files:
        files.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    for name in ("tests", "docs", "examples", "constraints.txt", "CHANGELOG.md", "LICENSE"):
        if not (source / name).exists():
            raise Failed(f"the source distribution lacks {name}")
    if left := [name for name in (".ci", "runs", "build", "site") if (source / name).exists()]:
        raise Failed(f"the source distribution has {', '.join(left)}")
    return wheel, source


def check(python: str, resolution: str, *, wheel: Path, source: Path, place: Path) -> str:
    """Use the wheel in a new environment. Returns the versions that were used. Raises Failed."""
    environment = place / "environment"
    # The file makes the dependencies direct ones, of which alone the lowest versions are taken.
    install = ["uv", "pip", "install", "--quiet", "--python", environment, "--resolution", resolution]
    install += ["--requirements", source / "pyproject.toml"]
    run(["uv", "venv", "--quiet", "--python", python, environment], cwd=ROOT)
    run([*install, wheel], cwd=ROOT)
    versions = run(["uv", "pip", "freeze", "--python", environment], cwd=ROOT)
    (place / "versions.txt").write_text(versions, encoding="utf-8")
    use(environment / "bin", place)
    run([*install, "--extra", "test", wheel], cwd=ROOT)
    run([environment / "bin" / "python", "-m", "pytest", "-q", "-n", "2", *TESTS], cwd=source)
    shown = [line for line in versions.splitlines() if line.partition("=")[0] in ("torch", "transformers", "pydantic")]
    return f"works with {', '.join(shown)}"


def use(programs: Path, place: Path) -> None:
    """The command and the library, without compiler and network: help, import, a pipeline, a kill and a resume.

    Raises Failed.
    """
    clean = {"PATH": str(programs), "HOME": str(place), "LC_ALL": "C.UTF-8"}
    unshare = shutil.which(ALONE[0])
    assert unshare is not None
    alone = [unshare, *ALONE[1:]]
    proximo = [*alone, programs / "proximo"]
    run([*proximo, "--help"], cwd=place, environment=clean)
    run([*alone, programs / "python", "-c", "import proximo; proximo.PPOTrainer"], cwd=place, environment=clean)
    run([*proximo, *TINY, "run.folder=whole"], cwd=place, environment=clean)
    kill_once([*proximo, *TINY, "run.folder=killed"], folder=place / "killed", environment=clean)
    run([*proximo, *TINY, "run.folder=killed", "--resume"], cwd=place, environment=clean)
    if (place / "whole" / WEIGHTS).read_bytes() != (place / "killed" / WEIGHTS).read_bytes():
        raise Failed("a run that was killed and resumed ended with other weights")


def kill_once(command: Sequence[str | Path], *, folder: Path, environment: Mapping[str, str]) -> None:
    """Start a pipeline in `folder`, and kill it as soon as its last stage has a checkpoint. Raises Failed."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    with open(folder.with_name("killed.txt"), "wb") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=folder.parent,
            env=dict(environment),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        while not (folder / SAVED).exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
    if status != -signal.SIGKILL or not (folder / SAVED).exists():
        raise Failed(f"the run to be killed ended by itself (exit status {status}): {output.name} has its output")


def run(command: Sequence[str | Path], *, cwd: Path, environment: Mapping[str, str] | None = None) -> str:
    """Standard output of a command. Raises Failed if it fails or takes too long."""
    words = [str(part) for part in command]
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env=None if environment is None else dict(environment),
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{' '.join(words)} took more than {DEADLINE_SECONDS} s") from error
    if done.returncode != 0:
        raise Failed(f"{' '.join(words)} ended with {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
