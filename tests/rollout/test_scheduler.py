"""Rows are given first come, first served, and never stand empty while a sample waits."""

import random

import pytest

from proximo.rollout.scheduler import Admission, Move, Scheduler, Slot


def make(lengths: list[int], *, num_samples: int = 1, num_rows: int = 4, prefill_tokens: int = 100) -> Scheduler:
    return Scheduler(lengths, num_samples=num_samples, num_rows=num_rows, prefill_tokens=prefill_tokens)


def admitted(prompt: int, first: int, *rows: int) -> Admission:
    return Admission(prompt_index=prompt, first_sample=first, rows=rows)


def test_a_group_that_does_not_fit_is_admitted_in_parts_and_prefilled_once() -> None:
    scheduler = make([5, 5], num_samples=3, num_rows=4)
    first = scheduler.admit()
    assert first == [admitted(0, 0, 0, 1, 2), admitted(1, 0, 3)]
    assert [each.needs_prefill for each in first] == [True, True]
    assert scheduler.admit() == []
    scheduler.release([1, 2])
    rest = scheduler.admit()
    assert rest == [admitted(1, 1, 1, 2)]
    assert not rest[0].needs_prefill
    assert not scheduler.done


def test_a_freed_row_goes_to_the_next_sample_at_once() -> None:
    scheduler = make([1] * 6, num_rows=2)
    assert scheduler.admit() == [admitted(0, 0, 0), admitted(1, 0, 1)]
    scheduler.release([0])
    assert scheduler.admit() == [admitted(2, 0, 0)]
    assert scheduler.compact() == []
    assert scheduler.rows == [Slot(prompt_index=2, sample_index=0), Slot(prompt_index=1, sample_index=0)]


def test_the_prefill_budget_splits_admissions_and_lets_a_long_prompt_through_alone() -> None:
    scheduler = make([6, 4, 1, 50, 2], num_rows=9, prefill_tokens=10)
    prompts = []
    while batch := scheduler.admit():
        prompts.append([each.prompt_index for each in batch])
    assert prompts == [[0, 1], [2], [3], [4]]


def test_holes_are_closed_from_the_end_when_nothing_waits() -> None:
    scheduler = make([1] * 5, num_rows=5)
    scheduler.admit()
    scheduler.release([0, 2, 4])
    assert scheduler.compact() == [Move(source=3, target=0)]
    assert [slot.prompt_index for slot in scheduler.rows if slot] == [3, 1]
    scheduler.release([0, 1])
    assert scheduler.compact() == []
    assert scheduler.rows == []
    assert scheduler.done


def test_nothing_to_do_is_done_at_once() -> None:
    scheduler = make([])
    assert scheduler.done
    assert scheduler.admit() == []


def test_a_row_is_not_released_twice() -> None:
    scheduler = make([1])
    scheduler.admit()
    scheduler.release([0])
    with pytest.raises(AssertionError, match="row 0"):
        scheduler.release([0])


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_is_served_once_and_rows_are_kept_full(seed: int) -> None:
    """A simulation: samples end at random; whatever happens, the invariants hold."""
    draw = random.Random(seed)
    lengths = [draw.randint(1, 12) for _ in range(draw.randint(0, 12))]
    num_samples, num_rows = draw.randint(1, 5), draw.randint(1, 9)
    scheduler = make(lengths, num_samples=num_samples, num_rows=num_rows, prefill_tokens=draw.randint(1, 20))
    served: list[tuple[int, int]] = []
    holder: dict[int, Slot] = {}
    while not scheduler.done:
        while batch := scheduler.admit():
            for each in batch:
                for offset, row in enumerate(each.rows):
                    assert row not in holder
                    holder[row] = Slot(prompt_index=each.prompt_index, sample_index=each.first_sample + offset)
                    served.append((each.prompt_index, each.first_sample + offset))
        for move in scheduler.compact():
            assert move.target not in holder
            holder[move.target] = holder.pop(move.source)
        assert scheduler.rows == [holder[row] for row in range(len(holder))]
        waiting = len(lengths) * num_samples - len(served)
        assert len(holder) == num_rows or waiting == 0
        partly = [p for p in range(len(lengths)) if 0 < sum(prompt == p for prompt, _ in served) < num_samples]
        assert len(partly) <= 1
        ended = [row for row in holder if draw.random() < 0.4]
        scheduler.release(ended)
        for row in ended:
            del holder[row]
    assert served == [(prompt, sample) for prompt in range(len(lengths)) for sample in range(num_samples)]
