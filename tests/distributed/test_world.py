"""Digests by which ranks compare what they hold."""

import pytest
import torch

from proximo.distributed.world import checksum, difference


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


def test_a_checksum_copies_nothing() -> None:
    """Of what lies together, as weights and moments do."""
    numbers = torch.ones(1024)
    with torch.profiler.profile(profile_memory=True) as profile:
        checksum([numbers])
    assert all(event.self_cpu_memory_usage < 1024 for event in profile.events())


def test_of_two_digests_the_parts_are_said_that_differ() -> None:
    assert difference({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == "b: 2 and 3; c: None and 4"
    assert difference("one", "other") == "one and other"
