"""Which prompts a filter by mean score deals and leaves out, epoch by epoch; and that its state is all of it."""

import json
from collections.abc import Mapping, Sequence

import pytest

from proximo.data.difficulty import DifficultyFilter, FilterOptions, FilterState
from proximo.data.order import epoch_order, rows_at
from proximo.errors import DataError

SEED = 7


def made(num_rows: int = 6, *, base_scores: Sequence[float | None] = (), **options) -> DifficultyFilter:
    known = [*base_scores, *[None] * (num_rows - len(base_scores))]
    return DifficultyFilter(known, FilterOptions(**({"above": 0.9} | options)), seed=SEED)


def deal(found: DifficultyFilter, count: int, scores: Mapping[int, Sequence[float]]) -> list[int]:
    """One step: the rows that were drawn, each with the scores of `scores`."""
    draws = found.draw(count)
    found.learn(draws, [scores.get(draw.row, [0.5]) for draw in draws])
    return [draw.row for draw in draws]


@pytest.mark.parametrize("count", [1, 4, 6, 13])
def test_nobody_leaves_and_the_order_is_that_without_a_filter(count: int) -> None:
    found = made()
    dealt = [row for _ in range(5) for row in deal(found, count, {})]
    assert dealt == rows_at(0, 5 * count, num_rows=6, seed=SEED)
    assert found.epochs_done == pytest.approx(5 * count / 6)


def test_a_prompt_whose_mean_is_above_the_bound_is_dealt_no_more_once_its_epoch_has_ended() -> None:
    found = made(below=0.1)
    scores = {0: [1.0, 0.9], 1: [1.0, 0.7], 2: [0.9], 3: [0.0, 0.1], 4: [0.1]}
    assert sorted([*deal(found, 3, scores), *deal(found, 3, scores)]) == [0, 1, 2, 3, 4, 5]
    assert (found.state.too_easy, found.state.too_hard) == ((0,), (3,))
    assert found.num_active == 4
    for epoch in (1, 2):
        wanted = [row for row in epoch_order(6, seed=SEED, epoch=epoch) if row not in {0, 3}]
        assert deal(found, 4, {}) == wanted


def test_the_step_that_ends_an_epoch_is_filled_before_the_epoch_is_judged() -> None:
    """Four of six, then the last two with the first two of the next epoch, whoever leaves."""
    found = made()
    first, second = epoch_order(6, seed=SEED, epoch=0), epoch_order(6, seed=SEED, epoch=1)
    leaves = {second[0]: [1.0], second[4]: [1.0]}
    assert deal(found, 4, leaves) == first[:4]
    assert deal(found, 4, leaves) == [*first[4:], *second[:2]]
    assert set(found.state.too_easy) == set(leaves)
    # What was dealt of the second epoch is not dealt again in it; what has left is passed over.
    assert deal(found, 3, {}) == [second[2], second[3], second[5]]
    assert found.state.epoch == 2


def test_scores_of_an_epoch_count_in_that_epoch_alone() -> None:
    """In the mean of its two epochs the prompt would stay; in that of the second it leaves."""
    found = made()
    deal(found, 6, {2: [0.0]})
    assert found.state.out == frozenset()
    deal(found, 6, {2: [1.0]})
    assert found.state.out == {2}


def test_a_step_that_takes_more_than_an_epoch_judges_each_of_them() -> None:
    found = made(min_prompts=1)
    draws = found.draw(15)
    assert [draw.epoch for draw in draws] == [0] * 6 + [1] * 6 + [2] * 3
    found.learn(draws, [[1.0] if draw.row == 4 and draw.epoch == 1 else [0.2] for draw in draws])
    assert (found.state.out, found.state.epoch) == ({4}, 2)


def test_a_prompt_without_a_score_is_not_judged() -> None:
    found = made(above=None, below=0.5)
    draws = found.draw(6)
    found.learn(draws, [[] if draw.row == 1 else [0.0] if draw.row == 2 else [1.0] for draw in draws])
    assert found.state.too_hard == (2,)


def test_the_farthest_out_leave_first_and_the_share_is_rounded_down() -> None:
    """Of six, a half is three; then of three, one."""
    found = made(below=0.3, above=0.6, max_fraction=0.5)
    scores = {0: [0.7], 1: [0.1], 2: [1.0], 3: [0.65], 4: [0.0], 5: [0.5]}
    deal(found, 6, scores)
    assert (set(found.state.too_easy), set(found.state.too_hard), found.state.kept_beyond_bounds) == ({2}, {1, 4}, 2)
    deal(found, 3, scores)
    assert (set(found.state.too_easy), found.state.kept_beyond_bounds) == ({0, 2}, 1)
    assert not found.is_used_up


def test_so_many_stay_that_a_step_repeats_none() -> None:
    found = made(min_prompts=4)
    deal(found, 6, {row: [0.91 + row / 100] for row in range(6)})
    assert (set(found.state.too_easy), found.state.kept_beyond_bounds) == ({4, 5}, 4)
    assert found.is_used_up
    for _ in range(3):
        assert set(deal(found, 4, {row: [1.0] for row in range(6)})) == {0, 1, 2, 3}
    assert found.num_active == 4


def test_the_first_epochs_can_be_left_alone() -> None:
    found = made(from_epoch=2)
    deal(found, 6, {3: [0.0], 4: [1.0]})
    assert found.state.out == frozenset()
    deal(found, 6, {3: [1.0]})
    assert found.state.out == {3}


def test_base_scores_leave_prompts_out_before_the_first_epoch() -> None:
    found = made(base_scores=[0.95, None, 0.9, 0.2], from_epoch=0)
    assert found.state.too_easy == (0,)
    assert deal(found, 5, {}) == [row for row in epoch_order(6, seed=SEED, epoch=0) if row != 0]
    assert made(base_scores=[0.95]).state.out == frozenset()


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_filter_that_is_put_back_goes_on_as_if_nothing_had_been(stop: int) -> None:
    def scores(step: int) -> dict[int, list[float]]:
        return {row: [(row * 7 + step * 3) % 10 / 9, 0.8] for row in range(11)}

    def run_on(found: DifficultyFilter, steps: range) -> list[list[int]]:
        return [deal(found, 3, scores(step)) for step in steps]

    through, until = (made(11, below=0.45, above=0.75, max_fraction=0.3, min_prompts=3) for _ in range(2))
    whole = run_on(through, range(12))
    assert through.num_active < 8
    run_on(until, range(stop))
    after = made(11, below=0.45, above=0.75, max_fraction=0.3, min_prompts=3)
    written = until.state.to_json()
    assert json.loads(json.dumps(written)) == written, "as a checkpoint wants it"
    after.state = FilterState.from_json(written)
    assert after.state == until.state
    assert run_on(after, range(stop, 12)) == whole[stop:]


def test_a_filter_that_can_do_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="can leave out none of 6 prompts: a step takes 6"):
        made(min_prompts=6)
    with pytest.raises(DataError, match="no row has any"):
        made(from_epoch=0)
