"""Ranks for tests, as one world (gloo, on the CPU): processes that stay and run functions, or run one and end."""

import faulthandler
import multiprocessing as mp
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from torch.distributed import TCPStore

from proximo.distributed.rank_environment import Place

DEADLINE_SECONDS = 900.0
COLLECTIVE_SECONDS = 400.0
SOON_SECONDS = 200.0
"""After one rank has failed, all have ended within this, also on a busy machine. It is shorter than the deadlines, so
that a wait which nobody ends shows."""
ENDING_SECONDS = 5.0
"""How long a process is waited for that has closed its pipe."""
PRELOADED = [
    *("proximo.distributed.process_group", "proximo.distributed.sharding", "tiny_runs", "architectures", "pytest"),
    *("proximo.ppo.from_recipe", "proximo.ppo.metrics.alarms", "proximo.supervised.sft_trainer"),
    *("proximo.supervised.recipes", "proximo_cpu.plug_in", "proximo_cpu.decoder", "proximo_cpu.attention"),
    "transformers.models.llama.modeling_llama",
]
"""What takes long to import, and is imported once for all ranks: they are forks of a process that computes nothing."""


class Ranks:
    """`size` processes of one world. A function that a test runs on them must be importable by name.

    Where one of them dies or hangs, that call alone fails: the next one has new processes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._faults = TemporaryDirectory(prefix="proximo-ranks-")
        """For each rank a file with its stacks when a signal ended it."""
        self._start()

    def _start(self) -> None:
        context = _forks()
        # Here and not on rank 0, so that it outlives a rank.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = [context.Pipe() for _ in range(self._size)]
        self._pipes = [mine for mine, _ in pipes]
        self._processes = [
            context.Process(
                target=_work, args=(rank, self._size, self._store.port, theirs, self._stacks(rank)), daemon=True
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of `function(*arguments)` on every rank, in order. Raises what went wrong, with the rank."""
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send((function, arguments))
            answers = self._answers()
        except (BrokenPipeError, ConnectionResetError, TimeoutError) as error:
            raise AssertionError(self._end(error)) from None
        problems = [f"rank {rank}:\n{problem}" for rank, (problem, _) in sorted(answers.items()) if problem]
        if problems:
            raise AssertionError("\n".join(problems))
        return [result for _, (_, result) in sorted(answers.items())]

    def _answers(self) -> dict[int, tuple[str | None, Any]]:
        """Rank -> problem and result. Raises ConnectionResetError where one ended, TimeoutError where one hangs."""
        answers: dict[int, tuple[str | None, Any]] = {}
        end = time.monotonic() + DEADLINE_SECONDS
        while len(answers) < self._size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                names = " and ".join(f"rank {rank}" for rank in waiting.values())
                raise TimeoutError(f"{names} did not answer within {DEADLINE_SECONDS} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    answers[waiting[pipe]] = pipe.recv()
                except EOFError:
                    raise ConnectionResetError from None
        return answers

    def _end(self, error: Exception) -> str:
        """End all processes, and say which one ended by itself, how, and where it was."""
        if not isinstance(error, TimeoutError):
            wait([process.sentinel for process in self._processes], timeout=ENDING_SECONDS)
        ends = []
        for rank, process in enumerate(self._processes):
            if (status := process.exitcode) is not None:
                how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                ends.append(f"rank {rank} {how}\n{self._stacks(rank).read_text()}".rstrip())
        self._kill()
        return "\n".join(ends) or str(error) or "a rank closed its pipe"

    def _stacks(self, rank: int) -> Path:
        return Path(self._faults.name, f"rank-{rank}.txt")

    def close(self) -> None:
        self._kill()
        self._faults.cleanup()

    def _kill(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()  # nothing of it is to be kept
            process.join()
        self._pipes, self._processes = [], []


@contextmanager
def ranks_of(size: int) -> Iterator[Ranks]:
    ranks = Ranks(size)
    try:
        yield ranks
    finally:
        ranks.close()


def _work(rank: int, size: int, port: int, pipe: Connection, stacks: Path) -> None:
    faulthandler.enable(stacks.open("w"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    from proximo.distributed.process_group import ProcessGroupWorld
    from proximo.distributed.world import using
    from proximo.run import journal

    torch.set_num_threads(1)
    journal.write_report = lambda folder: folder / "report.html"  # to draw it takes longer than what is tested here
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=timeout)
    world = ProcessGroupWorld(dist.PrefixStore("world", store), timeout_seconds=COLLECTIVE_SECONDS)
    with using(world):
        while True:
            try:
                function, arguments = pipe.recv()
            except EOFError:
                break
            try:
                answer = (None, function(*arguments))
            except BaseException:
                answer = (traceback.format_exc(), None)
            pipe.send(answer)
    os._exit(0)  # no destructors of groups whose other ranks have left


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnd:
    """How a rank of `joined` ended."""

    error: str
    """What it raised, class and message; empty for none."""
    at: float
    """When it ended, by a clock that all processes of the machine share."""
    status: int
    """0 unless something else than its function ended the process."""


def joined(function: Callable[..., Any], *arguments: Any, size: int = 2) -> list[RankEnd]:
    """How `function(*arguments)` ends within `proximo.join()` on each rank, in order. Each is a process of its own.

    A test sees thus what ranks do that fail: nothing of them stays, and the others notice that they are gone.
    """
    context = _forks()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = {"host": "127.0.0.1", "port": store.port, "first_hosts_store": False, "run": "a run"}
    pipes, processes = [context.Pipe(duplex=False) for _ in range(size)], []
    for rank, (_, theirs) in enumerate(pipes):
        place = Place(rank=rank, size=size, local_rank=rank, local_size=size, starter="torchrun", **address)
        processes.append(context.Process(target=_join, args=(place, theirs, function, arguments)))
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    try:
        return [_ended(process, mine) for process, (mine, _) in zip(processes, pipes, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _forks() -> Any:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        ensure_running()
    return context


def _ended(process: Any, pipe: Connection) -> RankEnd:
    if not pipe.poll(DEADLINE_SECONDS):
        return RankEnd(error=f"no answer within {DEADLINE_SECONDS} s", at=time.monotonic(), status=-1)
    try:
        error, at = pipe.recv()
    except EOFError:
        error, at = "its process was ended", time.monotonic()
    process.join(DEADLINE_SECONDS)
    return RankEnd(error=error, at=at, status=-1 if process.exitcode is None else process.exitcode)


def _join(place: Place, pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch

    from proximo.distributed.join import join

    torch.set_num_threads(1)
    error = ""
    try:
        with join(timeout_seconds=COLLECTIVE_SECONDS, place=place):
            function(*arguments)
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
    pipe.send((error, time.monotonic()))
    os._exit(0)  # as the command ends such ranks
