"""When a run saves."""

from proximo.checkpoint.store import SaveSchedule


class Clock:
    seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def test_by_steps():
    schedule = SaveSchedule(every_steps=3, every_minutes=None)
    assert [step for step in range(1, 11) if schedule.due(step)] == [3, 6, 9]


def test_by_minutes_since_the_last_save_whatever_caused_it():
    clock = Clock()
    schedule = SaveSchedule(every_steps=None, every_minutes=2.0, clock=clock)
    assert not schedule.due(1)
    clock.seconds += 119
    assert not schedule.due(2)
    clock.seconds += 1
    assert schedule.due(3)
    assert schedule.due(4)
    schedule.saved()
    assert not schedule.due(5)
    clock.seconds += 120
    assert schedule.due(6)


def test_by_both_and_by_neither():
    clock = Clock()
    both = SaveSchedule(every_steps=4, every_minutes=1.0, clock=clock)
    clock.seconds += 60
    assert both.due(3)
    both.saved()
    assert both.due(4)
    assert not both.due(5)
    assert not SaveSchedule(every_steps=None, every_minutes=None).due(100)
