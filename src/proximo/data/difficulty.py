"""Leaves out prompts that are too easy or too hard by their mean score, at the end of each epoch. Not the scoring.

The order of an epoch is that of all prompts (`order.py`), in which those that were left out are passed over: a function
of seed, epoch and who is out. What a run must keep to go on with the same prompts is one `FilterState`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from proximo.data.order import epoch_order
from proximo.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterOptions:
    """When a prompt leaves, and how many may."""

    above: float | None = None
    """A prompt with a higher mean score leaves: too easy."""
    below: float | None = None
    """A prompt with a lower one leaves: too hard."""
    max_fraction: float = 1.0
    """At most this share of the prompts that are left leaves at once, rounded down; the farthest out first."""
    from_epoch: int = 1
    """The first epoch at whose end prompts leave, counted from 1; 0: by `base_scores`, before the first."""
    min_prompts: int = 1
    """So many always stay, the nearest to the bounds."""

    def __post_init__(self) -> None:
        """Raises ConfigError for bounds that are not there or cross."""
        if self.above is None and self.below is None:
            raise ConfigError("a filter of prompts needs above (too easy), below (too hard) or both")
        if self.above is not None and self.below is not None and self.below > self.above:
            raise ConfigError(f"below ({self.below:g}) must not exceed above ({self.above:g}): no prompt would be left")


@dataclass(frozen=True, slots=True)
class Draw:
    """A prompt of a step, and the epoch whose order it was taken from."""

    epoch: int
    row: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterState:
    """Where the order stands, who is out, and the scores of the epoch that is under way."""

    epoch: int = 0
    passed: int = 0
    """Places of the epoch's order that were passed, those of prompts that are out included."""
    too_easy: tuple[int, ...] = ()
    too_hard: tuple[int, ...] = ()
    kept_beyond_bounds: int = 0
    """Prompts beyond a bound that stayed at the last end of an epoch: too many would have left."""
    scores: Mapping[int, tuple[float, int]] = field(default_factory=dict)
    """Prompt -> (sum, number) of its scores in this epoch."""

    @property
    def out(self) -> frozenset[int]:
        """All prompts that are left out."""
        return frozenset(self.too_easy) | frozenset(self.too_hard)

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint; JSON keeps floats to the bit, but has no keys that are numbers."""
        return {
            "epoch": self.epoch,
            "passed": self.passed,
            "too_easy": list(self.too_easy),
            "too_hard": list(self.too_hard),
            "kept_beyond_bounds": self.kept_beyond_bounds,
            "scores": [[row, total, count] for row, (total, count) in self.scores.items()],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "FilterState":
        """From a checkpoint."""
        return cls(
            epoch=content["epoch"],
            passed=content["passed"],
            too_easy=tuple(content["too_easy"]),
            too_hard=tuple(content["too_hard"]),
            kept_beyond_bounds=content["kept_beyond_bounds"],
            scores={row: (total, count) for row, total, count in content["scores"]},
        )


class DifficultyFilter:
    """Deals the prompts of a run, and leaves out those whose scores say so. Owns its state alone."""

    def __init__(self, base_scores: Sequence[float | None], options: FilterOptions, *, seed: int) -> None:
        """`base_scores`: of each prompt what the data says of earlier runs, None where it says nothing.

        Raises DataError where nothing can ever leave, and where `from_epoch` is 0 without a base score.
        """
        self.num_rows = len(base_scores)
        self.options = options
        self.seed = seed
        self.state = FilterState()
        if self.num_rows <= options.min_prompts:
            raise DataError(
                f"data.filter can leave out none of {self.num_rows} prompts: a step takes {options.min_prompts}, and "
                "so many always stay; give more prompts, lower ppo.prompts_per_step, or remove data.filter"
            )
        if options.from_epoch == 0:
            known = {row: (score, 1) for row, score in enumerate(base_scores) if score is not None}
            if not known:
                raise DataError(
                    "data.filter.from_epoch is 0, which leaves prompts out by their base_scores, but no row has any: "
                    "map the column that holds them under columns, or start from epoch 1"
                )
            self.state = self._judged(replace(self.state, scores=known))

    @property
    def num_active(self) -> int:
        """Prompts that may still be drawn."""
        return self.num_rows - len(self.state.out)

    @property
    def is_used_up(self) -> bool:
        """True where more prompts would have left, had a step not needed them."""
        return self.state.kept_beyond_bounds > 0 and self.num_active <= self.options.min_prompts

    @property
    def epochs_done(self) -> float:
        """Epochs behind the draws, with the part of the one under way."""
        return self.state.epoch + self.state.passed / self.num_rows

    def draw(self, count: int) -> list[Draw]:
        """The next `count` prompts. The last step of an epoch is filled from the next, before its end was judged."""
        out, epoch, passed = self.state.out, self.state.epoch, self.state.passed
        draws: list[Draw] = []
        while len(draws) < count:
            order = epoch_order(self.num_rows, seed=self.seed, epoch=epoch)
            draws += [Draw(epoch, row) for row in order[passed:] if row not in out]
            epoch, passed = epoch + 1, 0
        return draws[:count]

    def learn(self, draws: Sequence[Draw], scores: Sequence[Sequence[float]]) -> None:
        """Take the scores of the responses to each prompt that was drawn, and judge the epochs that have ended.

        Without a score, as where the reward source failed, a prompt is not judged.
        """
        pending = list(zip(draws, scores, strict=True))
        while pending:
            state = self.state
            here = [(draw, draw_scores) for draw, draw_scores in pending if draw.epoch == state.epoch]
            pending = pending[len(here) :]
            known = dict(state.scores)
            for draw, draw_scores in here:
                total, number = known.get(draw.row, (0.0, 0))
                if draw_scores:
                    known[draw.row] = (total + sum(draw_scores), number + len(draw_scores))
            state = replace(state, scores=known, passed=self._passed(here, state))
            self.state = self._next_epoch(state) if pending or state.passed == self.num_rows else state

    def _passed(self, here: Sequence[tuple[Draw, Any]], state: FilterState) -> int:
        order, out = epoch_order(self.num_rows, seed=self.seed, epoch=state.epoch), state.out
        passed = order.index(here[-1][0].row) + 1 if here else state.passed
        while passed < self.num_rows and order[passed] in out:
            passed += 1
        return passed

    def _next_epoch(self, state: FilterState) -> FilterState:
        judged = self._judged(state) if state.epoch + 1 >= self.options.from_epoch else state
        return replace(judged, epoch=state.epoch + 1, passed=0, scores={})

    def _judged(self, state: FilterState) -> FilterState:
        """The state in which those beyond a bound are out, as far as enough of them may leave; scores forgotten."""
        out = state.out
        beyond = []
        for row, (total, number) in state.scores.items():
            distance = self._distance(total / number)
            if distance and row not in out:
                beyond.append((-abs(distance), row, distance > 0))
        active = self.num_rows - len(out)
        allowed = min(int(active * self.options.max_fraction), active - self.options.min_prompts)
        leaving = sorted(beyond)[: max(0, allowed)]
        return replace(
            state,
            too_easy=(*state.too_easy, *(row for _, row, easy in leaving if easy)),
            too_hard=(*state.too_hard, *(row for _, row, easy in leaving if not easy)),
            kept_beyond_bounds=len(beyond) - len(leaving),
            scores={},
        )

    def _distance(self, mean: float) -> float:
        """By how much a mean score is above or (negative) below the bounds; 0 between them."""
        above, below = self.options.above, self.options.below
        if above is not None and mean > above:
            return mean - above
        return mean - below if below is not None and mean < below else 0.0
