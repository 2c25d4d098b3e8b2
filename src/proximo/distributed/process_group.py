"""A world of several ranks, over torch's process groups."""

import io
import json
import math
import pickle
import re
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from proximo.distributed.failure import status_of
from proximo.distributed.heartbeats import Position, Watch
from proximo.distributed.world import World, alone, difference, differing_ranks
from proximo.errors import ProximoError, RankError, TrainingError

Value = TypeVar("Value")
BUCKET_BYTES = 64 * 2**20
"""Most bytes of gradients that one collective adds up. It copies them, so this is also the size of the copy."""
LONGEST_WAIT_SECONDS = 0.02
"""A wait for a key of the store checks it at least this often, in seconds."""
DONE, PROBLEM = "done", "problem"
"""First byte of rank 0's answer to an effect: the value is sent next, or the error follows."""
TRANSPORT = re.compile(r"gloo|nccl|connection (closed|reset)|broken pipe|process group", re.IGNORECASE)
"""Words in errors of collectives that are called elsewhere: those of sharded models."""


class _LostError(RankError):
    """A wait outside of the main thread failed. `ProcessGroupWorld.explain` finds the missing rank later."""

    def __init__(self, what: str, error: Exception) -> None:
        super().__init__(f"waiting for the other ranks ({what}) failed: {error}")
        self.what = what


class ProcessGroupWorld(World):
    """Ranks of torch's default process group, with a second group (gloo, on the CPU) for records."""

    def __init__(self, store: dist.Store, *, timeout_seconds: float, watch: Watch | None = None) -> None:
        """`store`: shared by the ranks; no one else uses its keys. The default process group must be initialised.

        `watch` finds the missing rank when a wait fails.
        """
        super().__init__()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.store = store
        self.timeout_seconds = timeout_seconds
        self.timeout = timedelta(seconds=timeout_seconds)
        self.records = dist.new_group(backend="gloo", timeout=self.timeout)
        self.position = Position(0, "the start", waits=False)
        """The last wait of this rank."""
        self.watch = watch
        self._num_asides = 0
        self._num_effects = 0
        self._num_settled = 0
        self._num_deleted = 0

    def gather(self, value: Value, *, what: str) -> list[Value]:
        messages: list[Any] = [None] * self.size
        with self.waiting(what):
            dist.all_gather_object(messages, encode(value), group=self.records)
        self._num_settled = self._num_effects  # each rank had them before it came here
        return [decode(message) for message in messages]

    def gather_aside(self, value: Value, *, what: str) -> list[Value]:
        # Through the store: no second thread is in a collective, and no rank needs further connections to all others.
        self._num_asides += 1
        keys = [f"aside/{self._num_asides}/{rank}" for rank in range(self.size)]
        try:
            self.store.set(keys[self.rank], encode(value).hex())
            self._wait_for(keys, seconds=self.timeout_seconds)
            values = [decode(bytes.fromhex(self.store.get(key).decode())) for key in keys]
            # Every rank has come here, so that it has read what it came for before.
            self.store.delete_key(f"aside/{self._num_asides - 1}/{self.rank}")
        except (RuntimeError, dist.DistError) as error:
            raise _LostError(what, error) from error
        return values

    def add_up(self, tensors: Sequence[Tensor], *, what: str) -> None:
        with self.waiting(what), torch.no_grad():
            for bucket in _buckets(tensors):
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat)
                for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                    tensor.copy_(part.view_as(tensor))

    def on_rank_0(self, run: Callable[[], Value], *, what: str) -> Value:
        self._num_effects += 1
        key = f"effect/{self._num_effects}"
        if not self.leads:
            return self._result_of_first(key, what)
        try:
            with alone():
                value = run()
            message = _encoded_result(value, what)
        except BaseException as error:
            problem = json.dumps([f"rank 0: {type(error).__name__}: {error}", status_of(error)])
            with suppress(dist.DistError, RuntimeError):  # without waiting for the others, which may have failed
                self.store.set(key, PROBLEM + problem)
            raise
        with self.waiting(what):
            self._forget_effects()
            self.store.set(key, DONE)
            dist.broadcast_object_list([message], src=0, group=self.records)
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
        names = ", ".join(f"rank {rank}" if self.watch is None else self.watch.name_of(rank) for rank in differing)
        found = difference(digests[differing[0]], digests[common])
        raise RankError(
            f"{what}: {names} has other numbers than rank {common} ({found}). Ranks must have the same bits: their "
            "software, processors or memory differ, or this is a mistake of Proximo"
        )

    def send_to_first(self, channel: str, message: bytes) -> None:
        self.store.queue_push(channel, message)

    def received(self, channel: str) -> list[bytes]:
        return [self.store.queue_pop(channel) for _ in range(self.store.queue_len(channel))]

    @contextmanager
    def waiting(self, what: str) -> Generator[None]:
        """Encloses each collective, and turns its failure into an error that names the rank."""
        self._move_to(Position(self.position.number + 1, what, waits=True))
        try:
            yield
        except RankError:
            raise
        except (RuntimeError, dist.DistError) as error:
            raise self._cause(what, error) from error
        self._move_to(replace(self.position, waits=False))

    def _move_to(self, position: Position) -> None:
        self.position = position
        if self.watch is not None:
            self.watch.position = position

    def raise_failure(self, what: str) -> None:
        if self.watch is not None and self.watch.failure is not None:
            raise self.watch.cause(what)

    def explain(self, error: Exception) -> Exception:
        if isinstance(error, _LostError):
            return self._cause(error.what, error)
        said = isinstance(error, RuntimeError) and TRANSPORT.search(str(error))
        if isinstance(error, ProximoError) or not (said or isinstance(error, dist.DistError)):
            return error
        # A collective of a sharded model, which no wait of this class encloses.
        explained = self._cause(f"a pass of a model, {self.position}", error)
        explained.__cause__ = error
        return explained

    def when_stuck(self, tell: Callable[[str], None]) -> None:
        if self.watch is not None:
            self.watch.if_stuck = tell

    def publish(self, error: BaseException) -> None:
        if self.watch is not None:
            self.watch.publish_error(error, self.traces)

    def leave_at_once(self, status: int) -> None:
        # In a thread, since the handler may have interrupted code that holds the lock of the store's connection.
        left = RankError(f"rank {self.rank} ended early", exit_status=status)
        thread = threading.Thread(target=self.publish, args=(left,), daemon=True)
        thread.start()
        thread.join(timeout=1.0)

    def lost_first(self) -> str | None:
        return None if self.watch is None else self.watch.lost_first()

    def _cause(self, what: str, error: Exception) -> RankError:
        if self.watch is None:
            return RankError(f"waiting for the other ranks ({what}) failed: {error}")
        return self.watch.cause(what, error)

    def _wait_for(self, keys: list[str], *, seconds: float = math.inf) -> None:
        """Wait until all keys are in the store. Raises RuntimeError if the run ends first or the time limit passes."""
        # Not by `wait` of the store: torch prints two lines for each time limit that passes.
        start = time.monotonic()
        while not self.store.check(keys):
            if self.watch is not None and self.watch.failure is not None:
                raise RuntimeError(self.watch.failure.message)
            time.sleep(min(LONGEST_WAIT_SECONDS, 0.05 * (time.monotonic() - start)))  # the first ones are short
            if time.monotonic() - start > seconds:
                raise RuntimeError(f"not all ranks came within {seconds:g} s")

    def _result_of_first(self, key: str, what: str) -> Any:
        with self.waiting(what):
            self._wait_for([key])  # the effect has no deadline
            said = self.store.get(key).decode()
            if said.startswith(PROBLEM):
                problem, status = json.loads(said.removeprefix(PROBLEM))
                raise RankError(problem, exit_status=status)
            received: list[Any] = [None]
            dist.broadcast_object_list(received, src=0, group=self.records)
        return decode(received[0])

    def _forget_effects(self) -> None:
        """Delete the keys of effects that every rank has read."""
        while self._num_deleted < self._num_settled:
            self._num_deleted += 1
            self.store.delete_key(f"effect/{self._num_deleted}")


def _encoded_result(value: Any, what: str) -> bytes:
    try:
        return encode(value)
    except Exception as error:
        raise TrainingError(
            f"{what} gave a {type(value).__name__} that cannot be sent to the other ranks ({error}): return plain "
            "values, records or tensors"
        ) from error


def _buckets(tensors: Sequence[Tensor]) -> Generator[list[Tensor]]:
    """Groups consecutive tensors of one dtype and device into buckets of at most BUCKET_BYTES or one tensor."""
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


class _Pickler(pickle.Pickler):
    """Moves tensors to the CPU: the receiver would put one of an accelerator on the sender's device."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and (value.device.type != "cpu" or value.requires_grad):
            return _same, (value.detach().cpu(),)
        return NotImplemented


def encode(value: Any) -> bytes:
    """The message of a value. Raises what pickle raises for a value that cannot be sent."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def decode(message: bytes) -> Any:
    """The value of a message that a rank of this run encoded."""
    return pickle.loads(message)  # noqa: S301 - of this run's own ranks


def _same(value: Tensor) -> Tensor:
    return value
