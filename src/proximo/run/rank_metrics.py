"""Metrics that differ between the ranks of a run: tokens, and time spent waiting for each other."""

import time
from collections.abc import Sequence

from proximo.distributed.world import World
from proximo.metrics.values import Last, MetricValue
from proximo.run.task import Record

COUNTS = ("trained_tokens", "sampled_tokens")
"""Names of the counts of a rank (`World.counts`)."""


class RankMetrics:
    """Gathers the ranks' numbers once per step. With one rank there are none."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._start = time.perf_counter()
        self._waited = world.seconds_waited
        self._counted = dict(world.counts)

    def before_step(self) -> None:
        """Start counting. Without it, an evaluation before the step would count too, but not after a resume."""
        self._counted = dict(self._world.counts)

    def after_step(self) -> Record | None:
        """The metrics of the step that ended, the same on every rank; None for one rank."""
        world = self._world
        if world.size == 1:
            return None
        now = time.perf_counter()
        waited, seconds = world.seconds_waited - self._waited, now - self._start
        counted = {name: world.counts[name] - self._counted.get(name, 0) for name in COUNTS}
        self._start, self._waited = now, world.seconds_waited
        ranks = world.gather((waited / seconds, counted), what="the metrics of each rank")
        metrics: dict[str, MetricValue] = {}
        for name in COUNTS:
            metrics |= _spread(f"ranks/{name}", [counts[name] for _, counts in ranks])
        shares = [share for share, _ in ranks]
        metrics["ranks/waiting_share"] = Last(sum(shares) / len(shares))
        metrics["ranks/longest_waiting_share"] = Last(max(shares))
        return Record(metrics=metrics)


def _spread(name: str, counts: Sequence[int]) -> dict[str, MetricValue]:
    """Minimum, maximum, and how far the maximum exceeds the mean; empty if no rank counted any."""
    if not any(counts):
        return {}
    return {
        f"{name}_min": Last(min(counts)),
        f"{name}_max": Last(max(counts)),
        f"{name}_imbalance": Last(max(counts) * len(counts) / sum(counts)),
    }
