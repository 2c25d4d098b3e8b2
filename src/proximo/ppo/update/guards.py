"""Guards of policy updates: decide before the optimizer step whether to skip an update."""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Generic, TypeVar

from proximo.algorithms.losses import PolicyStatistics
from proximo.config.ppo.options import GuardConfig

Statistics = TypeVar("Statistics")


class PolicyGuard(Generic[Statistics]):
    """The guard of the updates of one step. At the first update it may stop the run, before anything was trained."""

    def __init__(
        self,
        config: GuardConfig,
        of_policy: Callable[[Statistics], PolicyStatistics],
        check_first: Callable[[PolicyStatistics], None],
    ) -> None:
        """`of_policy`: extracts policy statistics from those of a micro-batch. `check_first`: called with the
        statistics of the step's first minibatch; it may raise.
        """
        self._config = config
        self._of_policy = of_policy
        self._check_first = check_first
        self._is_first = True

    def refusal(self, parts: Sequence[Statistics]) -> str | None:
        """Why to skip the update of these micro-batches; None to take it."""
        total, config = self._total(parts), self._config
        if self._is_first:
            self._check_first(total)
        self._is_first = False
        ratio, divergence = (total.ratio / total.num_tokens).item(), _divergence(total)
        moved = f"the KL from the step's start is {divergence:.3g} per token, above"
        if config.target_kl is not None and divergence > config.target_kl:
            return f"{moved} ppo.guards.target_kl = {config.target_kl:g}: the updates of this step end here"
        if config.max_ratio is not None and ratio > config.max_ratio:
            return f"the mean ratio is {ratio:.3g}, above ppo.guards.max_ratio = {config.max_ratio:g}"
        if config.max_kl is not None and divergence > config.max_kl:
            return f"{moved} ppo.guards.max_kl = {config.max_kl:g}"
        return None

    def ends(self, parts: Sequence[Statistics]) -> bool:
        """Whether the KL exceeds `target_kl`, which ends the step before this update.

        The KL is k3: unlike the mean of log-ratios, it is never negative.
        """
        target = self._config.target_kl
        return target is not None and _divergence(self._total(parts)) > target

    def _total(self, parts: Sequence[Statistics]) -> PolicyStatistics:
        return reduce(add, (self._of_policy(part) for part in parts))


def _divergence(total: PolicyStatistics) -> float:
    """Mean k3 per token, in nats."""
    return (total.k3 / total.num_tokens).item()
