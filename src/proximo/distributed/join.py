"""Joins the ranks of a run: inside `join`, the world of this process has several ranks."""

import atexit
import logging
import os
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from proximo.distributed.failure import first_line, status_of
from proximo.distributed.rank_environment import Place, device_index, find_place
from proximo.distributed.world import World, current, using
from proximo.errors import ConfigError, JoinError, ProximoError
from proximo_verifiers.grader import num_cores

if TYPE_CHECKING:
    import torch.distributed as dist

    from proximo.distributed.heartbeats import Watch

START_SECONDS = 300.0
"""Least time for all ranks to join: they import torch first, and may be started one after the other."""
LINGER_SECONDS = 5.0
"""After a failure, the rank that serves the store waits this long for the others to read the reason."""


@contextmanager
def join(*, timeout_seconds: float = 600.0, place: Place | None = None) -> Generator[World]:
    """Inside, this process is one rank of the run that torchrun, srun or `proximo` started. A lone process stays alone.

        with proximo.join():
            trainer = PPOTrainer(...)

    An exception in one rank ends all ranks: in the others, the current wait raises a RankError that names the rank.
    On CUDA devices a process whose run failed exits with the status of the failure, even if it catches the error.

    Args:
        timeout_seconds: how long a rank waits for the others.
        place: which rank this is; None to read the environment variables.

    Raises ConfigError if variables of the launcher are missing, RankError if some ranks do not join, and JoinError if
    this rank finds none of them.
    """
    place = place or find_place()
    if place is None:
        yield current()
        return
    end = _EndAtExit()
    index, store, watch = _find_others(place, timeout_seconds, end)
    world: World = World()
    try:
        world = _make_world(store, watch, place, timeout_seconds, index=index)
        with using(world):
            yield world
            watch.leave()
            if world.leads:
                watch.claims_message()  # the run succeeded: nothing to print
            world.barrier(what="all ranks to end")
    except BaseException as error:
        explained = world.explain(error) if isinstance(error, Exception) else error
        watch.publish_error(explained, world.traces)
        if place.hosts_store:
            watch.linger(LINGER_SECONDS)
        watch.stop()
        end.status = status_of(explained)
        if explained is not error:
            raise explained from error
        raise
    watch.stop()
    _destroy()


def _find_others(place: Place, timeout_seconds: float, end: "_EndAtExit") -> "tuple[int | None, dist.Store, Watch]":
    """The index of this rank's CUDA device, the store that all ranks share, and the watch of this rank.

    Raises ConfigError if rank 0 cannot serve the store, else JoinError, since no other rank knows this one yet.
    """
    try:
        _prepare(place)
        index = _index_of_device(place)
        if index is not None:
            atexit.register(end)
        return index, *_connect(place, timeout_seconds)
    except ProximoError:
        raise
    except Exception as error:
        raise JoinError(f"{_name(place)} could not join the others: {type(error).__name__}: {error}") from error


class _EndAtExit:
    """Ends the process at exit if its run has failed. It is registered first, so `atexit` calls it last.

    After it, destructors of NCCL may wait for ranks that have ended, and nothing would end this process.
    """

    status: int | None = None
    """Exit status of the failure; None without a failure."""

    def __call__(self) -> None:
        if self.status is None:
            return
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # closed, or nobody reads it
                stream.flush()
        os._exit(self.status)


def _index_of_device(place: Place) -> int | None:
    """The index of this rank's CUDA device; None for the CPU."""
    import torch

    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return device_index(local_rank=place.local_rank, local_size=place.local_size, num_devices=num_devices)


def _connect(place: Place, timeout_seconds: float) -> "tuple[dist.Store, Watch]":
    """Connect to the store and start the heartbeats."""
    import torch.distributed as dist

    from proximo.distributed.heartbeats import DeadlineStore, Watch

    timeout = timedelta(seconds=max(timeout_seconds, START_SECONDS))
    served = _serve(place, timeout) if place.hosts_store else None

    def connect() -> dist.TCPStore:
        store = dist.TCPStore(place.host, place.port, is_master=False, timeout=timeout / 2)  # it tries twice
        store.set_timeout(timeout)
        return store

    try:
        shared, watched = connect(), connect()
        run = shared.compare_set("run", "", place.run).decode(errors="replace")
    except (dist.DistError, RuntimeError) as error:
        raise JoinError(
            f"{_name(place)} found no other rank: rank 0 does not answer at {place.host}:{place.port} "
            f"({first_line(error)}): it has ended, or this machine cannot reach it"
        ) from error
    if run != place.run:  # its ranks would take this one for theirs
        raise JoinError(
            f"{_name(place)} belongs to {place.run}, but at {place.host}:{place.port} it found the ranks of {run}: "
            "give each run another MASTER_PORT"
        )
    attempt = f"proximo/{place.attempt}"
    watch = Watch(
        DeadlineStore(dist.PrefixStore(attempt, watched), seconds=timeout_seconds),
        rank=place.rank,
        size=place.size,
        timeout_seconds=timeout_seconds,
        store_of="rank 0" if place.first_hosts_store else "the process that started the ranks",
        served=served,
        ends_are_reported=place.starter == "proximo",
    )
    watch.start()
    return dist.PrefixStore("world", dist.PrefixStore(attempt, shared)), watch


def _name(place: Place) -> str:
    """The name in messages, as `rank 2 of 8 (process 4711 on node1)`."""
    return f"rank {place.rank} of {place.size} (process {os.getpid()} on {socket.gethostname()})"


def _make_world(
    store: "dist.Store", watch: "Watch", place: Place, timeout_seconds: float, *, index: int | None
) -> World:
    """Wait for all ranks, and make their process groups. `index`: that of this rank's CUDA device."""
    import torch
    import torch.distributed as dist

    from proximo.distributed.process_group import ProcessGroupWorld

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, num_cores() // place.local_size))
    backend, timeout, device = "gloo", timedelta(seconds=timeout_seconds), None
    if index is not None:
        torch.cuda.set_device(index)
        backend = "cpu:gloo,cuda:nccl"
        device = (socket.gethostname(), str(torch.cuda.get_device_properties(index).uuid))
    watch.wait_for_all(max(timeout_seconds, START_SECONDS))
    try:
        groups = dist.PrefixStore("torch", store)
        dist.init_process_group(backend, store=groups, rank=place.rank, world_size=place.size, timeout=timeout)
        world = ProcessGroupWorld(store, timeout_seconds=timeout_seconds, watch=watch)
    except (dist.DistError, RuntimeError) as error:
        raise watch.cause("all ranks to start", error) from error
    world.local_rank, world.local_size = place.local_rank, place.local_size
    devices = world.gather(device, what="all ranks to start")
    if device is not None and devices.count(device) > 1:
        world.with_same_device = [rank for rank, other in enumerate(devices) if other == device]
    return world


def _prepare(place: Place) -> None:
    """Set the environment variables that torch reads."""
    os.environ["LOCAL_RANK"] = str(place.local_rank)  # Slurm has another name for it
    if place.one_machine:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, loopback)


def _serve(place: Place, timeout: timedelta) -> "dist.TCPStore":
    """Serve the store, which listens on the given address only."""
    from torch.distributed import TCPStore

    try:
        listener = listen(place)
    except OSError as error:
        raise ConfigError(
            f"rank 0 cannot listen at {place.host}:{place.port} ({error}): MASTER_ADDR must be an address of its "
            "machine, and MASTER_PORT a free port"
        ) from error
    port = listener.getsockname()[1]
    return TCPStore(
        place.host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def listen(place: Place) -> socket.socket:
    """Open a socket on the address of the store."""
    family, _, _, _, address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
    host = str(address[0])
    if not place.one_machine and (host.startswith("127.") or host == "::1"):
        host = ""  # this machine calls itself by a name that other machines resolve
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, place.port))
    listener.listen(max(128, 2 * place.size))
    return listener


def _destroy() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()
