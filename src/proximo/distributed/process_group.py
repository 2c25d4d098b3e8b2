"""A world of several processes, over torch's process groups."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from proximo.distributed.world import World, differing_ranks, on_host
from proximo.errors import RankError

Value = TypeVar("Value")
BUCKET_BYTES = 64 * 2**20
"""Most bytes of gradients that are added up in one collective, and so the size of the copy that this takes."""
LONGEST_WAIT_SECONDS = 5.0
"""While rank 0 runs an effect, the others look after it this often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """What an effect on rank 0 gave: its value, or what its exception said."""

    value: Any = None
    problem: str | None = None


class ProcessGroupWorld(World):
    """Ranks of torch's default process group, with a group of their own for records (gloo, on the CPU)."""

    def __init__(self, store: dist.Store, *, timeout_seconds: float) -> None:
        """`store`: shared by the ranks; its keys are this world's own. The default process group is initialised."""
        super().__init__()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.store = store
        self.timeout_seconds = timeout_seconds
        self.timeout = timedelta(seconds=timeout_seconds)
        self.records = dist.new_group(backend="gloo", timeout=self.timeout)
        self._aside = dist.new_group(backend="gloo", timeout=self.timeout)
        self.position = 0
        """Number of waits that this rank has entered."""
        self.waits_for = "the start"
        self._num_effects = 0
        self._num_sent = 0
        self._num_read: dict[tuple[str, int], int] = {}

    def gather(self, value: Value, *, what: str) -> list[Value]:
        values: list[Any] = [None] * self.size
        with self.waiting(what):
            dist.all_gather_object(values, on_host(value), group=self.records)
        return values

    def gather_aside(self, value: Value, *, what: str) -> list[Value]:
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self._aside)
        except (RuntimeError, dist.DistError) as error:
            raise RankError(f"waiting for the other ranks ({what}) failed: {error}") from error
        return values

    def gather_rows(self, rows: Tensor, *, what: str) -> Tensor:
        mine = rows.detach().cpu().contiguous()
        with self.waiting(what):
            counts = [mine.new_zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(counts, torch.tensor([len(mine)]), group=self.records)
            longest = int(max(counts))
            padded = mine.new_zeros((longest, *mine.shape[1:]))
            padded[: len(mine)] = mine
            parts = [torch.empty_like(padded) for _ in counts]
            # As bytes, since gloo does not carry every dtype.
            dist.all_gather([_bytes(part) for part in parts], _bytes(padded), group=self.records)
        return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])

    def add_up(self, tensors: Sequence[Tensor], *, what: str) -> None:
        with self.waiting(what), torch.no_grad():
            for bucket in _buckets(tensors):
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat)
                for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                    tensor.copy_(part.view_as(tensor))

    def once(self, run: Callable[[], Value], *, what: str) -> Value:
        self._num_effects += 1
        key = f"effect/{self._num_effects}"
        if not self.leads:
            outcome = self._outcome_of_first(key, what)
            if outcome.problem is not None:
                raise RankError(outcome.problem)
            return outcome.value
        try:
            value = run()
        except BaseException as error:
            self._publish(key, _Outcome(problem=f"rank 0: {type(error).__name__}: {error}"), what)
            raise
        self._publish(key, _Outcome(value=value), what)
        return value

    def barrier(self, *, what: str) -> None:
        with self.waiting(what):
            dist.barrier(group=self.records)

    def agree(self, digest: Any, *, what: str) -> None:
        digests = self.gather(digest, what=what)
        differing = differing_ranks(digests)
        if not differing:
            return
        common = next(rank for rank in range(self.size) if rank not in differing)
        names = ", ".join(str(rank) for rank in differing)
        raise RankError(
            f"{what}: rank {names} has other numbers than rank {common} ({digests[differing[0]]} and "
            f"{digests[common]}). Ranks must have the same bits: their software, processors or memory differ, or this "
            "is a mistake of Proximo"
        )

    def send_to_first(self, channel: str, message: bytes) -> None:
        self._num_sent += 1
        self.store.queue_push(f"{channel}/{self.rank}", message)

    def received(self, channel: str) -> list[bytes]:
        messages = []
        for rank in range(1, self.size):
            key = f"{channel}/{rank}"
            while self.store.queue_len(key) > 0:
                messages.append(self.store.queue_pop(key))
        return messages

    @contextmanager
    def waiting(self, what: str) -> Generator[None]:
        """Around each collective: counts its time, and turns its failure into an error that names the rank."""
        self.position += 1
        self.waits_for = what
        with self._waiting():
            try:
                yield
            except (RuntimeError, dist.DistError) as error:
                raise RankError(f"waiting for the other ranks ({what}) failed: {error}") from error

    def _publish(self, key: str, outcome: _Outcome, what: str) -> None:
        self.store.set(key, "done")
        with self.waiting(what):
            dist.broadcast_object_list([outcome], src=0, group=self.records)

    def _outcome_of_first(self, key: str, what: str) -> _Outcome:
        wait = timedelta(seconds=LONGEST_WAIT_SECONDS)
        with self.waiting(what):
            while True:
                try:
                    self.store.wait([key], wait)
                    break
                except dist.DistStoreError:  # not yet: the effect has no deadline of its own
                    continue
            received: list[Any] = [None]
            dist.broadcast_object_list(received, src=0, group=self.records)
        return received[0]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


def _buckets(tensors: Sequence[Tensor]) -> Generator[list[Tensor]]:
    """Consecutive tensors of one dtype and device, in buckets of at most BUCKET_BYTES or one tensor."""
    for _, group in groupby(tensors, lambda tensor: (tensor.dtype, tensor.device)):
        bucket: list[Tensor] = []
        num_bytes = 0
        for tensor in group:
            if bucket and num_bytes + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, num_bytes = [], 0
            bucket.append(tensor)
            num_bytes += tensor.nbytes
        if bucket:
            yield bucket
