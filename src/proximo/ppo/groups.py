"""Groups of responses whose outcomes are all equal: found, counted, left out. Not what an advantage is.

The outcome is the raw score of a source, or of all sources together, before anything that `ppo.score`, a penalty or
the KL does to it. A filter on shaped rewards finds no equal group, since shaping makes them differ, and its noise then
becomes an advantage of full size ("phantom advantage").
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from proximo.algorithms.advantages import equal_groups
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ConfigError
from proximo.metrics.values import Mean, MetricValue
from proximo.ppo.estimates import group_numbers
from proximo.records import Scored, ScoreState


def outcome_of(scored: Scored, name: str | None) -> float:
    """Whether, or how well, a response solved its task: the component of that name, or its whole score for None.

    0 for a response at fault that the source gave no such component. Raises ConfigError where it gave none to a
    response that it judged. Only for responses that have a score.
    """
    if name is None:
        return scored.score
    if name not in scored.components:
        if scored.state is ScoreState.MODEL_FAULT:
            return 0.0
        raise ConfigError(
            f"ppo.outcome is {name}, but the reward gave no component of that name; it gave: "
            f"{', '.join(sorted(scored.components)) or 'none'}"
        )
    return scored.components[name]


def equal_outcomes(scored: Sequence[Scored], counted: Tensor, config: PPOConfig) -> Tensor:
    """[R] bool: responses to a prompt all of whose responses that count have one outcome; `counted` [R] bool.

    True also for a response that is alone in its group: there is nothing to compare it with.
    """
    outcomes = [outcome_of(s, config.outcome) if counts else 0.0 for s, counts in zip(scored, counted, strict=True)]
    return equal_groups(torch.tensor(outcomes, dtype=torch.float64), group_numbers(scored), counted)


def group_metrics(scored: Sequence[Scored], counted: Tensor, config: PPOConfig) -> dict[str, MetricValue]:
    """Which share of the prompts, and of the responses, can teach something; nothing where groups are not compared."""
    outcome = {}
    if config.outcome is not None:
        outcome["score/outcome_mean"] = Mean.of(outcome_of(s, config.outcome) for s in scored if s.valid)
    if not config.advantage.compares_groups:
        return outcome
    equal, groups = equal_outcomes(scored, counted, config), group_numbers(scored)
    by_group = {int(group): bool(same) for group, same in zip(groups[counted], equal[counted], strict=True)}
    return outcome | {
        "group/equal_fraction": Mean.of(float(same) for same in by_group.values()),
        "group/effective_fraction": Mean.of((~equal[counted]).double().tolist()),
    }
