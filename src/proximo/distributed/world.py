"""The ranks that run one program together. In a world of one process every method returns its input without waiting.

Every rank calls the same methods in the same order. Values are sent as pickles between the ranks of one run, which
trust each other, over the addresses of their process group. `alone` and `in_background` are for what one process does
beside the others.
"""

import math
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # the checkpoint store, which asks for the world, loads no torch
    import torch
    from torch import Tensor

Value = TypeVar("Value")


class World:
    """A world of one process. `process_group.py` has that of several ranks."""

    rank: int = 0
    size: int = 1
    device: "torch.device | None" = None
    """The device to which models move after they were built on the host; None to leave them there."""
    timeout_seconds: float = math.inf
    """Seconds that a rank waits for the others."""
    local_rank: int = 0
    """Index among the ranks of this machine."""
    local_size: int = 1
    with_same_device: Sequence[int] = ()
    """All ranks with this rank's CUDA device, if there are several."""

    def __init__(self) -> None:
        self.traces: Path | None = None
        """The folder of the run for tracebacks of single ranks; None until the run is open."""
        self.server_logs: Path | None = None
        """The folder of the run for the logs of servers that it starts; None outside of a run."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0. Only rank 0 has effects outside: files, logs, rewards, users' functions."""
        return self.rank == 0

    def gather(self, value: Value, *, what: str) -> list[Value]:
        """The value of every rank, in the order of ranks, on every rank. `what` names the wait in messages."""
        del what
        return [value]

    def gather_aside(self, value: Value, *, what: str) -> list[Value]:
        """As `gather`, for one background thread, independent of the waits of the main thread."""
        return self.gather(value, what=what)

    def gather_rows(self, rows: "Tensor", *, what: str) -> "Tensor":
        """The rows [n, ...] of all ranks, concatenated by rank, on the CPU. n may differ between ranks."""
        if self.size == 1:
            return rows.cpu()
        import torch

        return torch.cat(self.gather(rows.detach().cpu().clone(), what=what))

    def add_up(self, tensors: Sequence["Tensor"], *, what: str) -> None:
        """Replace each tensor by its sum over all ranks, in place; every rank gets the same bits."""
        del tensors, what

    def on_rank_0(self, run: Callable[[], Value], *, what: str) -> Value:
        """Run an effect on rank 0 only. Every rank gets its result; an exception ends the run of every rank.

        Inside, the world is rank 0 by itself (`alone`), which may use models that are whole on it.

        The effect has no deadline, as on one device, but the others notice if rank 0 dies meanwhile.
        """
        del what
        return run()

    def barrier(self, *, what: str) -> None:
        """Wait until all ranks are here."""
        del what

    def agree(self, digest: Any, *, what: str) -> None:
        """Compare a digest of values that must be bit-equal on all ranks. Raises RankError that names who differs."""
        del digest, what

    def raise_failure(self, what: str) -> None:
        """Raise RankError if another rank has failed. For waits that poll; `what` names the wait."""
        del what

    def explain(self, error: Exception) -> Exception:
        """The error itself; if the failure of another rank caused it, an error that names that rank."""
        return error

    def publish(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed, so that they end while this one cleans up."""
        del error

    def leave_at_once(self, status: int) -> None:
        """Tell the other ranks that this process is about to end with a status, without a further message.

        May be called in a signal handler.
        """
        del status

    def lost_first(self) -> str | None:
        """The process of rank 0, as `process 4711 on node1`, if it has disappeared and this rank is to report it."""
        return None

    def when_stuck(self, tell: Callable[[str], None]) -> None:
        """Have `tell` called with the reason if the run fails and ends while the main thread hangs."""
        del tell

    def send_to_first(self, channel: str, message: bytes) -> None:
        """Send a message to rank 0, without waiting. Rank 0 reads it by `received`."""
        raise RuntimeError(f"a world of one rank has no other one to send {len(message)} bytes of {channel} to")

    def received(self, channel: str) -> list[bytes]:
        """New messages of other ranks that have arrived on rank 0, without waiting."""
        del channel
        return []

    @contextmanager
    def waiting(self, what: str) -> Generator[None]:
        """Encloses a wait for other ranks, which `what` names."""
        del what
        yield


_worlds: list[World] = [World()]
_alone: ContextVar[World | None] = ContextVar("alone", default=None)


def current() -> World:
    """The world of this process; inside `alone`, that of rank 0 by itself."""
    return _alone.get() or _worlds[-1]


def is_alone() -> bool:
    """Whether this code runs on rank 0 only, so that it must not wait for the others."""
    return _alone.get() is not None and _worlds[-1].size > 1


@contextmanager
def alone() -> Generator[None]:
    """Inside, on this thread, the world is this process by itself: other ranks do not run this code."""
    token = _alone.set(World())
    try:
        yield
    finally:
        _alone.reset(token)


@contextmanager
def using(world: World) -> Generator[World]:
    """Inside, `world` is the world of this process."""
    _worlds.append(world)
    try:
        yield world
    finally:
        _worlds.remove(world)


def in_background(work: Callable[[], Value], *, name: str) -> Future[Value]:
    """Begin to run a function in a thread of that name. Returns its result to come.

    The thread does not keep the process alive, as those of `concurrent.futures` do: a function of the user may hang,
    and a rank that failed must end.
    """
    return all_in_background([work], at_once=1, name=name)[0]


def all_in_background(works: Sequence[Callable[[], Value]], *, at_once: int, name: str) -> list[Future[Value]]:
    """Begin to run functions, in their order and at most `at_once` at the same time. Returns their results to come."""
    futures: list[Future[Value]] = [Future() for _ in works]
    waiting: SimpleQueue[tuple[Callable[[], Value], Future[Value]]] = SimpleQueue()
    for pair in zip(works, futures, strict=True):
        waiting.put(pair)

    def run() -> None:
        while True:
            try:
                work, future = waiting.get_nowait()
            except Empty:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # raised by `future.result`
                future.set_exception(error)

    for _ in works[:at_once]:
        Thread(target=run, name=name, daemon=True).start()
    return futures


def whole(tensor: "Tensor") -> "Tensor":
    """The whole tensor, gathered if it is sharded; then every rank has to call it."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def local(tensor: "Tensor") -> "Tensor":
    """The part of a tensor on this rank: its shard, or all of it."""
    part: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if part is None else part()


def checksum(tensors: Sequence["Tensor"]) -> int:
    """A number that changes with every bit of the tensors; in 64 bits, so that two changes may cancel each other."""
    import torch

    numbers = []
    for tensor in tensors:
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if raw.storage_offset() % 8:  # it cannot be viewed as numbers of 8 bytes
            raw = raw.clone()
        cut = len(raw) // 8 * 8
        numbers.append(raw[:cut].view(torch.int64).sum() + raw[cut:].sum(dtype=torch.int64))
    total = 0
    # Read together, so that the host waits for an accelerator once.
    for number in torch.stack([number.to(numbers[0].device) for number in numbers]).tolist() if numbers else []:
        total = (total * 1_000_003 + number) & 0xFFFF_FFFF_FFFF_FFFF
    return total


def difference(first: Any, second: Any) -> str:
    """Formats two digests for a message; for dicts only the keys that differ."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return f"{first} and {second}"
    keys = dict.fromkeys((*first, *second))
    return "; ".join(
        f"{key}: {first.get(key)} and {second.get(key)}" for key in keys if first.get(key) != second.get(key)
    )


def differing_ranks(digests: Sequence[Any]) -> list[int]:
    """The ranks whose digest is not the most common one. In a tie, that of the lowest rank counts as common."""
    counts = [digests.count(digest) for digest in digests]
    common = digests[counts.index(max(counts))]
    return [rank for rank, digest in enumerate(digests) if digest != common]
