"""The difficulty filter: at the end of each epoch it removes prompts whose mean score is too high or too low.

An epoch visits all prompts in the order of `order.py` and skips those that were removed. So the order is a function of
seed, epoch and the removed prompts, and a checkpoint needs only a `FilterState` to continue with the same prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from proximo.data.order import epoch_order
from proximo.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterOptions:
    """Which prompts are removed, and how many at most."""

    above: float | None = None
    """A prompt with a higher mean score is too easy, and is removed."""
    below: float | None = None
    """A prompt with a lower mean score is too hard, and is removed."""
    max_fraction: float = 1.0
    """At most this share of the remaining prompts is removed at once, rounded down; those farthest out first."""
    from_epoch: int = 1
    """The first epoch, counted from 1, at whose end prompts are removed; 0 also removes by `base_scores` before it."""
    min_prompts: int = 1
    """This many prompts always stay: those nearest to the bounds."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A prompt of a step, and the epoch whose order it was taken from."""

    epoch: int
    row: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterState:
    """The position in the order, the removed prompts, and the scores of the current epoch."""

    epoch: int = 0
    passed: int = 0
    """Number of positions of the epoch's order that are done, those of removed prompts included."""
    too_easy: tuple[int, ...] = ()
    too_hard: tuple[int, ...] = ()
    kept_beyond_bounds: int = 0
    """Prompts beyond a bound that stayed when the last epoch ended, because no more could be removed."""
    scores: Mapping[int, tuple[float, int]] = field(default_factory=dict)
    """Prompt -> (sum, number) of its scores in this epoch."""

    @property
    def out(self) -> frozenset[int]:
        """All prompts that the filter has removed so far."""
        return frozenset(self.too_easy) | frozenset(self.too_hard)

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint. JSON keeps every bit of a float, but its keys are text: hence the list of scores."""
        scores = [[row, total, count] for row, (total, count) in self.scores.items()]
        return asdict(self) | {"too_easy": list(self.too_easy), "too_hard": list(self.too_hard), "scores": scores}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "FilterState":
        """The state that `to_json` wrote to a checkpoint."""
        found, scores = cls(**content), {row: (total, count) for row, total, count in content["scores"]}
        return replace(found, too_easy=tuple(found.too_easy), too_hard=tuple(found.too_hard), scores=scores)


class DifficultyFilter:
    """Draws the prompts of a run, and removes those that are too easy or too hard."""

    def __init__(self, base_scores: Sequence[float | None], options: FilterOptions, *, seed: int) -> None:
        """`base_scores`: the score of each prompt in earlier runs, from the data; None if it has none.

        Raises DataError if no prompt could ever be removed, or if `from_epoch` is 0 and there is no base score.
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
            sums = {row: (score, 1) for row, score in enumerate(base_scores) if score is not None}
            if not sums:
                raise DataError(
                    "data.filter.from_epoch is 0, which leaves prompts out by their base_scores, but no row has any: "
                    "map the column that holds them under columns, or start from epoch 1"
                )
            self.state = self._filtered(replace(self.state, scores=sums))

    @property
    def num_active(self) -> int:
        """Number of prompts that are not removed."""
        return self.num_rows - len(self.state.out)

    @property
    def is_used_up(self) -> bool:
        """True if prompts beyond a bound stayed because a step needs them."""
        return self.state.kept_beyond_bounds > 0 and self.num_active <= self.options.min_prompts

    @property
    def epochs_done(self) -> float:
        """Epochs done, including the done fraction of the current one."""
        return self.state.epoch + self.state.passed / self.num_rows

    def draw(self, count: int) -> list[Draw]:
        """The next `count` prompts, without changing the state: `learn` does that.

        The last step of an epoch is filled up from the next one. These draws are made before the epoch is evaluated, so
        they may hold prompts that its end removes.
        """
        out, epoch, passed = self.state.out, self.state.epoch, self.state.passed
        draws: list[Draw] = []
        while len(draws) < count:
            order = epoch_order(self.num_rows, seed=self.seed, epoch=epoch)
            draws += [Draw(epoch, row) for row in order[passed:] if row not in out]
            epoch, passed = epoch + 1, 0
        return draws[:count]

    def learn(self, draws: Sequence[Draw], scores: Sequence[Sequence[float]]) -> None:
        """Record the scores of the responses to each drawn prompt, and end the epochs that are complete.

        A prompt without scores, for example because the reward source failed, is not evaluated.
        """
        pending = list(zip(draws, scores, strict=True))
        while pending:
            state = self.state
            # Draws are in order, so those of this epoch come first; the rest belong to later ones.
            of_epoch = [(draw, draw_scores) for draw, draw_scores in pending if draw.epoch == state.epoch]
            pending = pending[len(of_epoch) :]
            sums = dict(state.scores)
            for draw, draw_scores in of_epoch:
                total, number = sums.get(draw.row, (0.0, 0))
                if draw_scores:
                    sums[draw.row] = (total + sum(draw_scores), number + len(draw_scores))
            state = replace(state, scores=sums, passed=self._passed(of_epoch, state))
            # An epoch is over when a later one has draws, or when no prompt of its order is left.
            self.state = self._next_epoch(state) if pending or state.passed == self.num_rows else state

    def _passed(self, of_epoch: Sequence[tuple[Draw, Any]], state: FilterState) -> int:
        order, out = epoch_order(self.num_rows, seed=self.seed, epoch=state.epoch), state.out
        passed = order.index(of_epoch[-1][0].row) + 1 if of_epoch else state.passed
        # Removed prompts at the end of an order must count as done, or the epoch would never end.
        while passed < self.num_rows and order[passed] in out:
            passed += 1
        return passed

    def _next_epoch(self, state: FilterState) -> FilterState:
        filtered = self._filtered(state) if state.epoch + 1 >= self.options.from_epoch else state
        return replace(filtered, epoch=state.epoch + 1, passed=0, scores={})

    def _filtered(self, state: FilterState) -> FilterState:
        """The state after prompts beyond a bound are removed, as many as the options allow; its scores are cleared."""
        out = state.out
        beyond = []
        for row, (total, number) in state.scores.items():
            distance = self._distance(total / number)
            if distance and row not in out:
                beyond.append((-abs(distance), row, distance > 0))  # sorted by distance, ties by row
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
        """The distance of a mean score above the upper bound, or (negative) below the lower one; 0 between them."""
        above, below = self.options.above, self.options.below
        if above is not None and mean > above:
            return mean - above
        return mean - below if below is not None and mean < below else 0.0
