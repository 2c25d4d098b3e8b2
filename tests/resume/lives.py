"""The lives of a run: each is one process, which may be killed; the next goes on where it stopped. Not the killing."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from tiny_runs import Kind

HERE = Path(__file__).parent
KILLED = -9


@dataclass(frozen=True, kw_only=True)
class Life:
    """How a process ended."""

    status: int
    where: str
    """Where it was killed; empty where it was not."""


def write_recipe(recipe: Mapping[str, Any]) -> Path:
    """The recipe as a file beside its run folder."""
    path = Path(recipe["run"]["folder"]).with_name("recipe.yaml")
    path.write_text(yaml.safe_dump(dict(recipe), sort_keys=False), encoding="utf-8")
    return path


def environment() -> dict[str, str]:
    """Of a process that can import what these tests import."""
    folders = [str(HERE), str(HERE.parent), str(HERE.parent / "checkpoint"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "OMP_NUM_THREADS": "1"}


class Driver:
    """A running `killing_driver.py`."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "killing_driver.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            text=True,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._process.communicate()

    def live(self, kind: Kind, recipe: Mapping[str, Any], kill: Mapping[str, Any] | None = None) -> Life:
        """Start the run or go on with it in a new process, and kill it where `kill` says."""
        path = write_recipe(recipe)
        job = {
            "argv": [kind, str(path), "--resume=auto", "--quiet"],
            "kill": kill,
            "folder": recipe["run"]["folder"],
            "output": str(path.with_name("output.txt")),
            "note": str(path.with_name("note.txt")),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        life = Life(**json.loads(self._process.stdout.readline()))
        wanted = 0 if kill is None else KILLED
        assert life.status == wanted, f"exit {life.status}: {Path(job['output']).read_text()[-2000:]}"
        return life
