"""What keeps an update of the policy from being taken, before the optimizer sees it. Not how skips are counted."""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Generic, TypeVar

from proximo.algorithms.losses import PolicyStatistics
from proximo.config.ppo.options import GuardConfig

Statistics = TypeVar("Statistics")


class PolicyGuard(Generic[Statistics]):
    """The guard of one step's updates. At the first it may stop the run, while nothing was learned yet."""

    def __init__(
        self,
        config: GuardConfig,
        of_policy: Callable[[Statistics], PolicyStatistics],
        check_first: Callable[[PolicyStatistics], None],
    ) -> None:
        """`of_policy`: what the statistics of a micro-batch say of the policy. `check_first` sees those of the step's
        first minibatch.
        """
        self._config = config
        self._of_policy = of_policy
        self._check_first = check_first
        self._is_first = True

    def refusal(self, parts: Sequence[Statistics]) -> str | None:
        """Why the update of these micro-batches is skipped, if it is."""
        total, config = self._total(parts), self._config
        if self._is_first:
            self._check_first(total)
        self._is_first = False
        ratio, divergence = (total.ratio / total.num_tokens).item(), _divergence(total)
        moved = f"the KL from the step's start is {divergence:.3g} per token, above"
        if config.target_kl is not None and divergence > config.target_kl:
            return f"{moved} target_kl = {config.target_kl:g}: the updates of this step end here"
        if config.max_ratio is not None and ratio > config.max_ratio:
            return f"the mean ratio is {ratio:.3g}, above max_ratio = {config.max_ratio:g}"
        if config.max_kl is not None and divergence > config.max_kl:
            return f"{moved} max_kl = {config.max_kl:g}"
        return None

    def ends(self, parts: Sequence[Statistics]) -> bool:
        """k3, which is never negative, unlike the mean of the log-ratios; and before the update, not after it."""
        target = self._config.target_kl
        return target is not None and _divergence(self._total(parts)) > target

    def _total(self, parts: Sequence[Statistics]) -> PolicyStatistics:
        return reduce(add, (self._of_policy(part) for part in parts))


def _divergence(total: PolicyStatistics) -> float:
    """k3 per token."""
    return (total.k3 / total.num_tokens).item()
