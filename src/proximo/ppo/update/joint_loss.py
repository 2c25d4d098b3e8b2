"""Policy loss and value loss of one pass through a shared trunk, added, and told apart again. Not the two losses."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from proximo.algorithms.losses import PolicyStatistics, ValueStatistics
from proximo.learner.update import UpdateResult
from proximo.ppo.update.reports import Taken


@dataclass(frozen=True, kw_only=True, slots=True)
class JointStatistics:
    """What one micro-batch says of both parts. The losses are shares of the update's, as for one part alone."""

    policy: PolicyStatistics
    value: ValueStatistics
    policy_loss: Tensor
    value_loss: Tensor
    """Before it is weighted."""


def joint_loss(
    policy: tuple[Tensor, PolicyStatistics], value: tuple[Tensor, ValueStatistics], *, coefficient: float
) -> tuple[Tensor, JointStatistics]:
    """policy loss + coefficient * value loss (arXiv:1707.06347, eq. 9), a scalar, with what each part is."""
    (policy_loss, moved), (value_loss, errors) = policy, value
    statistics = JointStatistics(
        policy=moved, value=errors, policy_loss=policy_loss.detach(), value_loss=value_loss.detach()
    )
    return policy_loss + coefficient * value_loss, statistics


def policy_share(taken: Taken[JointStatistics]) -> Taken[PolicyStatistics]:
    """The same updates as those of a policy alone; the gradient is that of both."""
    return _share(taken, lambda part: (part.policy_loss, part.policy))


def value_share(taken: Taken[JointStatistics]) -> Taken[ValueStatistics]:
    """The same updates as those of a value model alone; the gradient is that of both."""
    return _share(taken, lambda part: (part.value_loss, part.value))


def _share(taken: Taken[JointStatistics], of: Callable[[JointStatistics], tuple[Tensor, Any]]) -> Taken[Any]:
    def share(result: UpdateResult[JointStatistics]) -> UpdateResult[Any]:
        losses, statistics = zip(*(of(part) for part in result.statistics), strict=True)
        return replace(cast("UpdateResult[Any]", result), loss=sum(x.item() for x in losses), statistics=statistics)

    return replace(cast("Taken[Any]", taken), results=[share(result) for result in taken.results])
