"""The learning rate by position."""

import pytest

from proximo.learner.optimizers import learning_rate_factor


def factors(kind, *, num_updates=10, warmup_updates=0, floor=0.0) -> list[float]:
    options = {"num_updates": num_updates, "warmup_updates": warmup_updates, "kind": kind, "floor": floor}
    return [learning_rate_factor(update, **options) for update in range(num_updates + 3)]


def test_linear_falls_in_equal_steps_and_every_fall_ends_at_its_floor():
    assert factors("constant", floor=0.5) == [1.0] * 13
    assert factors("linear") == pytest.approx([1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0, 0, 0])
    for kind in ("linear", "cosine"):
        found = factors(kind, floor=0.1)
        assert (found[0], found[10:]) == (1, [0.1] * 3)
        assert found[5] == pytest.approx(0.55)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_warm_up_climbs_in_equal_steps_and_wastes_no_update_at_zero(kind):
    found = factors(kind, warmup_updates=3)
    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert found[4] <= 1
    assert (found[4] == 1) == (kind == "constant")


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("warmup_updates", [10, 20])
def test_a_warm_up_as_long_as_the_run_only_climbs(kind, warmup_updates):
    found = factors(kind, warmup_updates=warmup_updates)[:10]
    assert found == sorted(found)
    assert found[0] == pytest.approx(1 / (warmup_updates + 1))
