"""What of a step counts: which responses have a score, a say and a group, and what an experience says of them. Pure.

The outcome is the raw score of a source, or of all sources together, before anything that `ppo.score`, a penalty or
the KL does to it. A filter on shaped rewards finds no equal group, since shaping makes them differ, and its noise then
becomes an advantage of full size ("phantom advantage").
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from proximo.algorithms.advantages import zero_variance_groups
from proximo.algorithms.kl import k1
from proximo.algorithms.segments import segment_sum, value_positions
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ConfigError
from proximo.records import Experience, Finish, Scored, ScoreState


def counts(scored: Scored, config: PPOConfig) -> bool:
    """False for a response that counts nowhere in its step."""
    cut = scored.response.finish is Finish.LENGTH and config.truncation_value == "mask"
    return scored.valid and bool(scored.response.response_mask.any()) and not cut


def counted_ones(scored: Sequence[Scored], config: PPOConfig) -> Tensor:
    """[R] bool: False for responses that count nowhere in their step."""
    return torch.tensor([counts(each, config) for each in scored], dtype=torch.bool)


def nothing_to_learn(experience: Experience, config: PPOConfig) -> bool:
    """True where no response tells the policy anything: a flat step, or one whose groups all have equal outcomes.

    An update would still move weights: by the optimizer's momentum, and by what else is in the loss, at full size,
    since AdamW makes any lasting gradient that.
    """
    excludes = config.advantage.zero_variance_groups == "exclude"
    nothing = excludes and not bool(experience.mask.any()) and bool(counted_ones(experience.scored, config).any())
    return experience.is_flat or nothing


def token_values(experience: Experience) -> Tensor:
    """[T] the value before each response token, without the one after the last."""
    if experience.values is None:
        raise ValueError("this experience was made without a critic")
    return experience.values[value_positions(experience.lengths)]


def has_score(scored: Scored, config: PPOConfig) -> bool:
    """False where it could not be scored, and where it was cut and `score.score_truncated` denies it its score."""
    unscored = scored.response.finish is Finish.LENGTH and not config.score.score_truncated
    return scored.valid and not unscored


def group_numbers(scored: Sequence[Scored]) -> Tensor:
    """[R] a number for each prompt, equal for its responses."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(s.response.prompt.id, len(numbers)) for s in scored])


def task_reward_of(scored: Scored, name: str | None) -> float:
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
            f"ppo.task_reward is {name}, but the reward gave no component of that name; it gave: "
            f"{', '.join(sorted(scored.components)) or 'none'}"
        )
    return scored.components[name]


def equal_outcomes(scored: Sequence[Scored], counted: Tensor, config: PPOConfig) -> Tensor:
    """[R] bool: responses to a prompt all of whose responses that count have one outcome; `counted` [R] bool.

    True also for a response that is alone in its group: there is nothing to compare it with.
    """
    outcomes = [
        task_reward_of(s, config.task_reward) if counts else 0.0 for s, counts in zip(scored, counted, strict=True)
    ]
    return zero_variance_groups(torch.tensor(outcomes, dtype=torch.float64), group_numbers(scored), counted)


def counted_responses(experience: Experience) -> list[int]:
    """The responses of which a token counts: not those without a score, nor those under `truncation_value: mask`."""
    return [i for i, part in enumerate(experience.mask.split(list(experience.lengths))) if part.any()]


def sequence_kl(experience: Experience) -> list[float | None]:
    """Per response the sum over its counted tokens of k1, in nats; None in a run without a reference."""
    if experience.reference_logprobs is None:
        return [None] * len(experience.lengths)
    per_token = k1(experience.old_logprobs, experience.reference_logprobs)
    return list(segment_sum(torch.where(experience.mask, per_token, 0.0), experience.lengths).tolist())
