"""Runs the recipe `tiny` and prints, as JSON, the sources that its PPO stage enters. Started by budgets.py.

A file counts where a function of it is called. Its import alone does not count. No plug-in brings kernels or faster
layers: the step runs through the core alone, as it does on a device without them.
"""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import proximo
from proximo import kernels
from proximo.commands.library.training import Training
from proximo.config.schema.base import Section
from proximo.ppo.kind import PPOKind
from proximo.ppo.task import PPOTask

PACKAGES = f"{Path(proximo.__file__).parents[1]}/proximo"
ADVANTAGES = "make_experience"
"""The function that makes advantages of scores."""

entered: dict[str, set[str]] = {}
"""What was traced -> the files of the newest such call."""


@contextmanager
def profiled(watch: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Calls `watch` at each call and return of this thread and of those that start meanwhile."""
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def is_ours(code: CodeType) -> bool:
    """Whether the code is a function of one of our packages."""
    return code.co_filename.startswith(PACKAGES) and code.co_name != "<module>"


def has_section(value: object) -> bool:
    """Whether a value is a recipe or a section of one, or a collection that holds one."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(each, Section) for each in held)


def traced_build(build: Callable[..., Any]) -> Callable[..., Any]:
    """The files whose functions get the recipe or a section of it, until the task is built."""

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not is_ours(code := frame.f_code) or code.co_filename in files:
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(has_section(frame.f_locals.get(name)) for name in names):
            files.add(code.co_filename)

    @wraps(build)
    def wrapped(*args: Any) -> Any:
        files.clear()
        with profiled(watch):
            return build(*args)

    files = entered.setdefault("recipe", set())
    return wrapped


def traced_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """The files that a step calls, and those that it calls while it makes advantages of scores."""

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return") or not is_ours(code := frame.f_code):
            return
        if code.co_name == ADVANTAGES:
            state["inside"] = event == "call"
        if event == "call":
            files.add(code.co_filename)
            if state["inside"]:
                advantages.add(code.co_filename)

    @wraps(step)
    def wrapped(*args: Any) -> Any:
        files.clear()
        advantages.clear()
        with profiled(watch):
            return step(*args)

    state = {"inside": False}
    files, advantages = entered.setdefault("step", set()), entered.setdefault("advantages", set())
    return wrapped


if __name__ == "__main__":
    kernels.entry_points = lambda **_: []
    PPOKind.build = traced_build(PPOKind.build)
    PPOTask.step = traced_step(PPOTask.step)
    Training("tiny", {"run.folder": sys.argv[1]}, quiet=True).fit(quiet=True)
    print(json.dumps({what: sorted(files) for what, files in entered.items()}))
