"""Ranks for tests: processes that stay, and run functions of tests as one world (gloo, on the CPU)."""

import multiprocessing as mp
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import TCPStore

DEADLINE_SECONDS = 240.0
COLLECTIVE_SECONDS = 100.0


class Ranks:
    """`size` processes of one world. A function that a test runs on them must be importable by name."""

    def __init__(self, size: int) -> None:
        context = mp.get_context("spawn")
        # Here and not on rank 0, so that it outlives a rank.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = [context.Pipe() for _ in range(size)]
        self._pipes = [mine for mine, _ in pipes]
        self._processes = [
            context.Process(target=_work, args=(rank, size, self._store.port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of `function(*arguments)` on every rank, in order. Raises what went wrong, with the rank."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(DEADLINE_SECONDS):
                raise AssertionError(f"rank {rank} did not answer within {DEADLINE_SECONDS} s")
            answers.append(pipe.recv())
        problems = [f"rank {rank}:\n{problem}" for rank, (problem, _) in enumerate(answers) if problem]
        if problems:
            raise AssertionError("\n".join(problems))
        return [result for _, result in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()


@contextmanager
def ranks_of(size: int) -> Iterator[Ranks]:
    ranks = Ranks(size)
    try:
        yield ranks
    finally:
        ranks.close()


def _work(rank: int, size: int, port: int, pipe: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    from proximo.distributed.process_group import ProcessGroupWorld
    from proximo.distributed.world import using

    torch.set_num_threads(1)
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
