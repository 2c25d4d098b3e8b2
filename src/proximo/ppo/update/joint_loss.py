"""Adds policy and value loss on a shared trunk, and separates their statistics for the reports."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from proximo.algorithms.losses import PolicyStatistics, ValueStatistics
from proximo.learner.update import UpdateResult
from proximo.ppo.update.reports import UpdateLog


@dataclass(frozen=True, kw_only=True, slots=True)
class JointStatistics:
    """Statistics of a micro-batch for both losses. The losses are the micro-batch's shares of the update's losses."""

    policy: PolicyStatistics
    value: ValueStatistics
    policy_loss: Tensor
    value_loss: Tensor
    """The value loss before it is multiplied by its coefficient."""


def joint_loss(
    policy: tuple[Tensor, PolicyStatistics], value: tuple[Tensor, ValueStatistics], *, coefficient: float
) -> tuple[Tensor, JointStatistics]:
    """policy loss + coefficient * value loss (arXiv:1707.06347, eq. 9), a scalar, with the statistics of both."""
    (policy_loss, moved), (value_loss, errors) = policy, value
    statistics = JointStatistics(
        policy=moved, value=errors, policy_loss=policy_loss.detach(), value_loss=value_loss.detach()
    )
    return policy_loss + coefficient * value_loss, statistics


def policy_share(taken: UpdateLog[JointStatistics]) -> UpdateLog[PolicyStatistics]:
    """The policy's part of joint updates. Gradient norms are those of the joint loss."""
    return _share(taken, lambda part: (part.policy_loss, part.policy))


def value_share(taken: UpdateLog[JointStatistics]) -> UpdateLog[ValueStatistics]:
    """The value model's part of joint updates. Gradient norms are those of the joint loss."""
    return _share(taken, lambda part: (part.value_loss, part.value))


def _share(taken: UpdateLog[JointStatistics], of: Callable[[JointStatistics], tuple[Tensor, Any]]) -> UpdateLog[Any]:
    def share(result: UpdateResult[JointStatistics]) -> UpdateResult[Any]:
        losses, statistics = zip(*(of(part) for part in result.statistics), strict=True)
        return replace(cast("UpdateResult[Any]", result), loss=sum(x.item() for x in losses), statistics=statistics)

    return replace(cast("UpdateLog[Any]", taken), results=[share(result) for result in taken.results])
