"""What ranks tell each other: digests of what they hold, results of effects, messages."""

import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import IO, Any

import pytest
import torch

from distributed.ranks import Ranks
from proximo.distributed.process_group import ProcessGroupWorld
from proximo.distributed.world import checksum, current, difference
from proximo.errors import RankError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_a_checksum_changes_with_every_bit(dtype: torch.dtype, offset: int) -> None:
    """Also where numbers of 8 bytes do not fit, at the begin or at the end."""
    memory = torch.zeros(8 * 13, dtype=torch.uint8)
    numbers = memory.view(dtype)[offset:11]
    before, first = checksum([numbers]), offset * numbers.element_size()
    assert before == checksum([torch.zeros(len(numbers), dtype=dtype)])
    for byte in range(first, first + numbers.nbytes):
        memory[byte] = 128
        assert checksum([numbers]) != before
        memory[byte] = 0


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11
def test_a_checksum_copies_nothing() -> None:
    """Of what lies together, as weights and moments do."""
    numbers = torch.ones(1024)
    with torch.profiler.profile(profile_memory=True) as profile:
        checksum([numbers])
    assert all(event.self_cpu_memory_usage < 1024 for event in profile.events())


def test_of_two_digests_the_parts_are_said_that_differ() -> None:
    assert difference({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == "b: 2 and 3; c: None and 4"
    assert difference("one", "other") == "one and other"


def run_slow_effect() -> tuple[str, str]:
    """What this rank gets of an effect that takes a while, and what it prints meanwhile, also below Python."""
    with tempfile.TemporaryFile() as file, kept_errors(file):
        found = current().on_rank_0(lambda: time.sleep(2.5) or "done", what="a slow effect")
        file.seek(0)
        return found, file.read().decode()


@contextmanager
def kept_errors(file: IO[bytes]) -> Iterator[None]:
    before = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def test_who_waits_for_an_effect_of_rank_0_prints_nothing(two: Ranks) -> None:
    assert two.run(run_slow_effect) == [("done", ""), ("done", "")]


class CountedStore:
    """A store that counts questions for the length of a queue."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.asked = 0

    def queue_len(self, key: str) -> int:
        self.asked += 1
        return self.store.queue_len(key)

    def queue_pop(self, key: str) -> bytes:
        return self.store.queue_pop(key)


def send_messages() -> tuple[list[bytes], int]:
    """The messages that rank 0 got, in their order, and how often it asked the store for news."""
    world = current()
    assert isinstance(world, ProcessGroupWorld)
    for number in range(0 if world.leads else 3):
        world.send_to_first("news", f"{world.rank}: {number}".encode())
    world.barrier(what="messages")
    store = CountedStore(world.store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "store", store)
        messages = world.received("news") if world.leads else []
    return messages, store.asked


def test_rank_0_asks_once_for_the_messages_of_all(three: Ranks) -> None:
    (messages, asked), *_ = three.run(send_messages)
    assert asked == 1
    for rank in (1, 2):
        assert [each for each in messages if each.startswith(b"%d:" % rank)] == [
            b"%d: %d" % (rank, i) for i in range(3)
        ]
    assert len(messages) == 6


def gather_beside_collectives() -> tuple[list[list[int]], int]:
    """What a thread gathers while the main thread is in collectives, and how many keys this leaves in the store."""
    world = current()
    assert isinstance(world, ProcessGroupWorld)
    before = world.store.num_keys()

    def gather(step: int) -> list[int]:
        return world.gather_aside(10 * step + world.rank, what="aside")

    with ThreadPoolExecutor(1) as pool:
        gathered = [pool.submit(gather, step) for step in range(5)]
        sums = [torch.ones(1000) for _ in range(5)]
        world.add_up(sums, what="sums")
        found = [each.result() for each in gathered]
    assert all((each == world.size).all() for each in sums)
    world.barrier(what="the end of both")
    return found, world.store.num_keys() - before


def test_a_thread_gathers_beside_the_waits_of_the_main_thread(three: Ranks) -> None:
    for found, more_keys in three.run(gather_beside_collectives):
        assert found == [[10 * step, 10 * step + 1, 10 * step + 2] for step in range(5)]
        assert more_keys <= 3  # those of the last one


def gather_with_who_comes_late() -> str:
    world = current()
    assert isinstance(world, ProcessGroupWorld)
    if world.leads:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(world, "timeout_seconds", 0.0)
            with pytest.raises(RankError, match=r"\(aside\).* came within 0 s"):
                world.gather_aside("first", what="aside")
    world.barrier(what="its deadline")
    return "in time" if world.leads else world.gather_aside("late", what="aside")[1]


def test_what_a_thread_gathers_has_a_deadline(two: Ranks) -> None:
    assert two.run(gather_with_who_comes_late) == ["in time", "late"]
