"""Agent programs as environments with one step, which lasts as long as the program and is given where the model is.

Runs in the process of a player, which has the deadline and the limit of memory. Imports no torch.
"""

import inspect
import json
import math
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any
from urllib.parse import urlsplit

from proximo.environments.players.player import MakeEnvironment, imported, prepares
from proximo.errors import ConfigError
from proximo_verifiers.callables import calling_problem
from proximo_verifiers.workers.services import one_line

MAX_OUTPUT_BYTES = 2**24
"""Most of what a program may print to its output, and to its errors."""
WATCH_SECONDS = 0.1
"""How often that is looked at."""


@prepares
def function_agent(path: str) -> MakeEnvironment:
    """What makes an agent of the function `run(base_url, row, seed)` at a path. Raises ConfigError for another."""
    function = imported(path)
    if problem := calling_problem(function, keywords={"base_url": "", "row": {}, "seed": 0}, may_await=True):
        raise ConfigError(f"environment.path: {path} is called as run(base_url=..., row=..., seed=...), but {problem}")
    return lambda: FunctionAgent(function, owns_process=True)


class FunctionAgent:
    """Calls a function, which may be a coroutine."""

    def __init__(self, run: Callable[..., Any], *, owns_process: bool = False) -> None:
        """`owns_process`: no other episode runs in this process: environment variables may say where the model is."""
        self._run = run
        self._owns_process = owns_process

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Note what the program will be given."""
        self._given = {"row": row, "seed": seed}
        return "", {}

    async def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Run the program to its end. `text`: `base_url` and `api_key`, as JSON."""
        where = json.loads(text)
        if self._owns_process:
            os.environ |= variables(where)
        answer = self._run(base_url=where["base_url"], **self._given)
        return ended(await answer if inspect.isawaitable(answer) else answer)


class CommandAgent:
    """Runs a command, which reads a row as JSON from its standard input and prints its reward as the last line."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Note what the program will be given."""
        self._given = json.dumps({"row": dict(row), "seed": seed}).encode()
        return "", {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Run the program to its end. Raises RuntimeError for one that fails, with the end of what it said."""
        environment = {**os.environ, **variables(json.loads(text))}
        with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as said:
            asked.write(self._given)
            asked.seek(0)
            process = subprocess.Popen(self._command, stdin=asked, stdout=printed, stderr=said, env=environment)
            if status := _status(process, printed, said):
                raise RuntimeError(f"the program ended with status {status}: {_end_of(said)}")
            printed.seek(0)
            lines = printed.read().decode("utf-8", "replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        try:
            return ended(json.loads(last))
        except ValueError:
            reason = f"the last line that a program prints must be its reward, it is {last!r:.80}"
            raise RuntimeError(reason) from None


class VerifiersAgent:
    """Asks a bridge (`verifiers_process.py`) to play an episode of verifiers. Its connection ends with this process."""

    def __init__(self, address: str) -> None:
        self._address = address

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Note the task: rows are numbered as the tasks are."""
        del seed
        self._task = int(row["episode"])
        return "", {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Wait for the end of the episode. Raises RuntimeError for one without a reward."""
        where = json.loads(text)
        url = where["base_url"].replace(f"/t/{where['trajectory']}/", "/")
        asked = {"task": self._task, "url": url, "api_key": where["api_key"], "trajectory": where["trajectory"]}
        with socket.socket(socket.AF_UNIX) as bridge:
            bridge.connect(self._address)
            bridge.sendall(json.dumps(asked).encode() + b"\n")
            said = json.loads(bridge.makefile("rb").readline(MAX_OUTPUT_BYTES) or '{"fault": "its process has ended"}')
        if "fault" in said:
            raise RuntimeError(f"verifiers: {said['fault']}")
        return *ended(said["reward"])[:-1], said["info"]  # a metric may be named `reward` or `truncated`


def variables(where: Mapping[str, str]) -> dict[str, str]:
    """The environment variables by which programs find the model, those of OpenAI's clients among them."""
    base_url, key = where["base_url"], where["api_key"]
    direct = dict.fromkeys(filter(None, (*os.environ.get("NO_PROXY", "").split(","), urlsplit(base_url).hostname)))
    return {"BASE_URL": base_url, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key, "NO_PROXY": ",".join(direct)}


def ended(answer: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """The last step of an episode: a reward, or a mapping with `reward`, perhaps `truncated`, and numbers for metrics.

    Raises TypeError for another answer.
    """
    info = dict(answer) if isinstance(answer, Mapping) else {"reward": answer}
    reward, truncated = info.pop("reward", None), info.pop("truncated", False)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise TypeError(f"an agent returns its reward, a finite number, or a mapping with `reward`; got {answer!r:.80}")
    return "", float(reward), not truncated, bool(truncated), info


def _status(process: "subprocess.Popen[bytes]", *outputs: IO[bytes]) -> int:
    """How a program ended. Raises RuntimeError for one that prints too much, and kills it.

    Outputs are files, not pipes, which would wait for the end of all that the program leaves running.
    """
    with process:
        while process.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(WATCH_SECONDS)
            if any(os.fstat(output.fileno()).st_size > MAX_OUTPUT_BYTES for output in outputs):
                process.kill()
                raise RuntimeError(f"the program printed more than {MAX_OUTPUT_BYTES:,} bytes")
    return process.returncode


def _end_of(file: IO[bytes]) -> str:
    """The last line that a program said."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
    lines = file.read().decode("utf-8", "replace").strip().splitlines()
    return one_line(lines[-1]) if lines else "it said nothing"
