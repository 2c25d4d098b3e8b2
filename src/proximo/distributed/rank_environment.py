"""Reads from environment variables which rank of a run this process is. `proximo`, torchrun or Slurm's srun set them.

Imports no torch, so that a single process starts quickly.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from proximo.errors import ConfigError

LAUNCHED = "PROXIMO_LAUNCHED"
"""Set in the ranks that `launch.py` starts."""
_OF_A_RANK = re.compile(
    f"{LAUNCHED}|(LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
    "|(TORCHELASTIC|SLURM_STEP)_.*"
)
FIRST_PORT, NUM_PORTS = 20_000, 20_000
"""Ports for the store of a Slurm step. The numbers of job and step choose one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The rank of this process, and how it finds the other ranks."""

    rank: int
    size: int
    local_rank: int
    """Index among the ranks of this machine."""
    local_size: int
    host: str
    """Address of the store in which the ranks find each other."""
    port: int
    first_hosts_store: bool
    """Whether rank 0 has to serve the store itself."""
    run: str
    """The name of the run for its launcher (a job of Slurm). Ranks of another run may have the same address."""
    attempt: str = "0"
    """The number of restarts so far. It keeps the addresses of earlier attempts apart in the store."""
    starter: Literal["proximo", "torchrun", "slurm"]

    @property
    def hosts_store(self) -> bool:
        """Whether this process has to serve the store."""
        return self.first_hosts_store and self.rank == 0

    @property
    def one_machine(self) -> bool:
        """Whether all ranks are on this machine."""
        return self.size == self.local_size


def find_place(environment: Mapping[str, str] | None = None) -> Place | None:
    """The place of this process by the environment; None for a single process, or the only rank of its launcher.

    Raises ConfigError for variables that are missing or contradict each other.
    """
    given = os.environ if environment is None else environment
    if "RANK" in given and "WORLD_SIZE" in given:
        place = _of_torchrun(given)
    elif "SLURM_STEP_NUM_TASKS" in given:  # set by srun; a batch script has most of the other variables too
        place = _of_slurm(given)
    else:
        return None
    if not 0 <= place.rank < place.size or not 0 <= place.local_rank < place.local_size <= place.size:
        raise ConfigError(
            f"the environment says rank {place.rank} of {place.size}, and {place.local_rank} of {place.local_size} on "
            f"this machine: ranks count from 0. Start every rank by {place.starter}, or unset its variables"
        )
    return place if place.size > 1 else None


def without_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that make a process one rank of a run."""
    return {name: value for name, value in environment.items() if not _OF_A_RANK.fullmatch(name)}


def idle_tasks(environment: Mapping[str, str]) -> int:
    """Tasks that Slurm has for this job if srun did not start this process; 0 if it did."""
    text = environment.get("SLURM_NTASKS", "1")
    return int(text) if text.isdecimal() and int(text) > 1 and "SLURM_STEP_NUM_TASKS" not in environment else 0


def device_index(*, local_rank: int, local_size: int, num_devices: int) -> int | None:
    """The index of a rank's CUDA device among those that it sees; None if the rank has no device for itself.

    A launcher shows each rank either all devices of the machine or only its own (Slurm's --gpus-per-task=1).
    """
    if num_devices == 1:
        return 0
    return local_rank if local_size <= num_devices else None


def _of_torchrun(given: Mapping[str, str]) -> Place:
    rank, size = _number(given, "RANK"), _number(given, "WORLD_SIZE")
    served = given.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(
        rank=rank,
        size=size,
        local_rank=_number(given, "LOCAL_RANK"),
        local_size=_number(given, "LOCAL_WORLD_SIZE"),
        host=_text(given, "MASTER_ADDR"),
        port=_number(given, "MASTER_PORT"),
        first_hosts_store=not served,
        run=f"torchrun --rdzv-id={given.get('TORCHELASTIC_RUN_ID', 'none')}",
        attempt=given.get("TORCHELASTIC_RESTART_COUNT", "0"),
        starter="proximo" if LAUNCHED in given else "torchrun",
    )


def _of_slurm(given: Mapping[str, str]) -> Place:
    rank, node = _number(given, "SLURM_PROCID"), _number(given, "SLURM_NODEID")
    per_node = _tasks_per_node(_text(given, "SLURM_STEP_TASKS_PER_NODE"))
    if node >= len(per_node):
        raise ConfigError(
            f"SLURM_NODEID is {node}, and SLURM_STEP_TASKS_PER_NODE ({given['SLURM_STEP_TASKS_PER_NODE']}) has "
            f"{len(per_node)} nodes: start the ranks by srun"
        )
    job, step = _number(given, "SLURM_JOB_ID"), _number(given, "SLURM_STEP_ID")
    chosen = FIRST_PORT + (job * 7 + step) % NUM_PORTS
    return Place(
        rank=rank,
        size=_number(given, "SLURM_STEP_NUM_TASKS"),
        local_rank=_number(given, "SLURM_LOCALID"),
        local_size=per_node[node],
        host=given.get("MASTER_ADDR") or first_host(_text(given, "SLURM_STEP_NODELIST")),
        port=_number(given, "MASTER_PORT") if "MASTER_PORT" in given else chosen,
        first_hosts_store=True,
        run=f"Slurm's job {job}, step {step}",
        attempt=given.get("SLURM_RESTART_COUNT", "0"),
        starter="slurm",
    )


def first_host(hosts: str) -> str:
    """The first host in a list of Slurm: `gpu01` of `gpu[01-04,07],login`."""
    plain = re.match(r"[^,\[]+", hosts)
    if plain is None:
        raise ConfigError(f"SLURM_STEP_NODELIST is {hosts!r}, which names no host first: set MASTER_ADDR")
    numbers = re.match(r"\[(\d+)[^\]]*\]([^,\[]*)", hosts[plain.end() :])
    return plain[0] if numbers is None else f"{plain[0]}{numbers[1]}{numbers[2]}"


def _tasks_per_node(text: str) -> list[int]:
    """Tasks of each node from Slurm's short form: `8(x2),4` is 8, 8 and 4."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise ConfigError(
                f"SLURM_STEP_TASKS_PER_NODE is {text!r}; it must have the form 8(x2): start the ranks by srun"
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _text(given: Mapping[str, str], name: str) -> str:
    if not given.get(name):
        raise ConfigError(
            f"the environment says that this process is one of several ranks, but has no {name}: start the ranks by "
            "torchrun or srun (docs/scale.md), or unset RANK and WORLD_SIZE"
        )
    return given[name]


def _number(given: Mapping[str, str], name: str) -> int:
    text = _text(given, name)
    if not text.isdecimal():
        raise ConfigError(f"the environment variable {name} is {text!r}; a number is wanted")
    return int(text)
