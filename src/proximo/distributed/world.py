"""The ranks that run one program together. A world of one process is the identity: it imports and waits for nothing.

Every rank calls the same methods in the same order. Values travel between ranks of one run, which trust each other: as
pickles, on the addresses of their process group.
"""

import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # the checkpoint store, which asks for the world, loads no torch
    import torch
    from torch import Tensor

Value = TypeVar("Value")


class World:
    """The ranks of this process's group. This class is one process alone; `process_group.py` has several."""

    rank: int = 0
    size: int = 1
    device: "torch.device | None" = None
    """Where the models of this rank go once they were built on the host; None for where they are."""
    timeout_seconds: float = math.inf
    """How long a rank waits for the others."""
    local_rank: int = 0
    """Number among the ranks of this machine."""
    local_size: int = 1
    with_same_device: Sequence[int] = ()
    """All ranks that have this rank's CUDA device, where there are several."""

    def __init__(self) -> None:
        self.seconds_waited = 0.0
        """Time in collectives of this class since the start, which includes the wait for slower ranks."""
        self.counts: Counter[str] = Counter()
        """What this rank alone did since the start, such as `trained_tokens` and `sampled_tokens`."""
        self.traces: Path | None = None
        """The folder of the run for tracebacks of single ranks, once it is open."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone has effects outside: files, logs, rewards, users' functions."""
        return self.rank == 0

    def gather(self, value: Value, *, what: str) -> list[Value]:
        """The value of every rank, in the order of ranks, on every rank. `what` names the wait in messages."""
        del what
        return [value]

    def gather_aside(self, value: Value, *, what: str) -> list[Value]:
        """As `gather`, for one background thread: it does not meet the waits of the main thread."""
        return self.gather(value, what=what)

    def gather_rows(self, rows: "Tensor", *, what: str) -> "Tensor":
        """The rows [n, ...] of all ranks, concatenated in the order of ranks, on the CPU. Ranks may have other n."""
        del what
        return rows.cpu()

    def add_up(self, tensors: Sequence["Tensor"], *, what: str) -> None:
        """Replace each tensor by its sum over all ranks, in place; every rank gets the same bits."""
        del tensors, what

    def once(self, run: Callable[[], Value], *, what: str) -> Value:
        """Run an effect on rank 0 alone. Every rank gets its result; an exception ends the run of every rank.

        Inside, the world is rank 0 by itself (`alone`): it may use models that lie whole there.

        There is no deadline for the effect itself, as on one device, but the others notice if rank 0 dies meanwhile.
        """
        del what
        return run()

    def barrier(self, *, what: str) -> None:
        """Wait until all ranks are here."""
        del what

    def agree(self, digest: Any, *, what: str) -> None:
        """Compare a digest of what all ranks must have in the same bits. Raises RankError that names who differs."""
        del digest, what

    def raise_failure(self, what: str) -> None:
        """Raise RankError if another rank has failed already. For waits that poll; `what` names the wait."""
        del what

    def explain(self, error: Exception) -> Exception:
        """The error itself, or where it only followed from the failure of another rank, one that names that."""
        return error

    def publish(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed. What follows may take a while, and they end meanwhile."""
        del error

    def leave_at_once(self, status: int) -> None:
        """Tell the other ranks that this process is about to end with a status, and that nothing more is to be said.

        May be called in a signal handler.
        """
        del status

    def reports_for_first(self) -> bool:
        """Whether rank 0 is gone, and this rank is to say so; true once, on one rank."""
        return False

    def process_of_first(self) -> str:
        """The process of rank 0, such as `process 4711 on node1`. For a rank that speaks for it."""
        raise RuntimeError("a world of one rank has no other one that could be gone")

    def pass_over_signals(self, numbers: Sequence[signal.Signals]) -> None:
        """On a rank above 0: go on where one of them comes, since rank 0 ends the run, and say so if it does not."""
        del numbers

    def heeds_signal(self) -> None:
        """On rank 0: a signal came, and ends the run. May be called in its handler."""

    def when_stuck(self, tell: Callable[[str], None]) -> None:
        """Call `tell` with the reason where the run has failed, and ends while the main thread hangs."""
        del tell

    def send_to_first(self, channel: str, message: bytes) -> None:
        """Leave a message for rank 0, without waiting. Rank 0 reads it by `received`."""
        raise RuntimeError(f"a world of one rank has no other one to send {len(message)} bytes of {channel} to")

    def received(self, channel: str) -> list[bytes]:
        """Messages of other ranks that have arrived on rank 0 and were not read yet, without waiting."""
        del channel
        return []

    @contextmanager
    def waiting(self, what: str) -> Generator[None]:
        """Around a wait for other ranks, which `what` names: counts its time."""
        del what
        with self._waiting():
            yield

    @contextmanager
    def _waiting(self) -> Generator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds_waited += time.perf_counter() - start


_worlds: list[World] = [World()]
_alone: ContextVar[World | None] = ContextVar("alone", default=None)


def current() -> World:
    """The world of this process; inside `alone` that of rank 0 by itself."""
    return _alone.get() or _worlds[-1]


def is_alone() -> bool:
    """Whether this code runs on rank 0 alone, so that it must not wait for the others."""
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


def whole(tensor: "Tensor") -> "Tensor":
    """The whole of a tensor, gathered if it is sharded; then every rank has to call it."""
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
        if raw.storage_offset() % 8:  # it could not be read as numbers of 8 bytes
            raw = raw.clone()
        cut = len(raw) // 8 * 8
        numbers.append(raw[:cut].view(torch.int64).sum() + raw[cut:].sum(dtype=torch.int64))
    total = 0
    # Asked for together: an accelerator is waited for once.
    for number in torch.stack([number.to(numbers[0].device) for number in numbers]).tolist() if numbers else []:
        total = (total * 1_000_003 + number) & 0xFFFF_FFFF_FFFF_FFFF
    return total


def difference(first: Any, second: Any) -> str:
    """Two digests, for a message; of dicts only the parts that differ."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return f"{first} and {second}"
    keys = dict.fromkeys((*first, *second))
    return "; ".join(
        f"{key}: {first.get(key)} and {second.get(key)}" for key in keys if first.get(key) != second.get(key)
    )


def differing_ranks(digests: Sequence[Any]) -> list[int]:
    """The ranks whose digest is not the most frequent one; of equally frequent ones, that of the lowest rank."""
    counts = [digests.count(digest) for digest in digests]
    common = digests[counts.index(max(counts))]
    return [rank for rank, digest in enumerate(digests) if digest != common]
