"""Which responses of a step count: in the loss, in statistics, in their group. Pure functions.

Groups are compared by task rewards: raw scores, before `ppo.score`, penalties and the KL change them. After shaping,
scores of a zero-variance group differ by noise, which standardising would scale to full-size advantages ("phantom
advantage").
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from proximo.algorithms.advantages import zero_variance_groups
from proximo.algorithms.flat_layout import segment_sum, value_positions
from proximo.algorithms.kl import k1
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ConfigError, DataError
from proximo.records import Experience, Finish, Scored, ScoreState


def counts(scored: Scored, config: PPOConfig) -> bool:
    """Whether a response counts in its step: it was scored, has a policy token, and is not masked as truncated."""
    cut = scored.response.finish is Finish.LENGTH and config.truncation_value == "mask"
    return scored.valid and bool(scored.response.response_mask.any()) and not cut


def counted_mask(scored: Sequence[Scored], config: PPOConfig) -> Tensor:
    """[R] bool: `counts` of each response."""
    return torch.tensor([counts(s, config) for s in scored], dtype=torch.bool)


def nothing_to_learn(experience: Experience, config: PPOConfig) -> bool:
    """Whether no response has a learning signal: returns hardly differ, or all groups have zero variance.

    An update would still change the weights, by the optimizer's momentum and by other terms of the loss: AdamW scales
    even a small persistent gradient to a full-size step.
    """
    excludes = config.advantage.excludes_zero_variance
    nothing = excludes and not bool(experience.mask.any()) and bool(counted_mask(experience.scored, config).any())
    return experience.is_flat or nothing


def token_values(experience: Experience) -> Tensor:
    """[T] the value before each response token, without the value after the last one."""
    if experience.values is None:
        raise ValueError("this experience was made without a critic")
    return experience.values[value_positions(experience.lengths)]


def has_score(scored: Scored, config: PPOConfig) -> bool:
    """Whether a response has a score.

    False if scoring failed, or it was truncated and `score.score_truncated` is false.
    """
    unscored = scored.response.finish is Finish.LENGTH and not config.score.score_truncated
    return scored.valid and not unscored


def group_ids(scored: Sequence[Scored]) -> Tensor:
    """[R] group index of each response: responses to one prompt have the same index."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(s.response.prompt.id, len(numbers)) for s in scored])


def pair_ids(scored: Sequence[Scored]) -> Tensor:
    """[R] index of the pair of each response: 2 i and 2 i + 1 are a pair.

    Raises DataError if they are not two responses to one prompt.
    """
    prompts = [s.response.prompt.id for s in scored]
    if len(prompts) % 2 or prompts[::2] != prompts[1::2]:
        raise DataError(
            "policy_loss.objective online_dpo and online_ipo compare two responses to each prompt, one after the "
            f"other; the {len(prompts)} given responses do not come in such pairs"
        )
    return torch.arange(len(scored)) // 2


def task_reward_of(scored: Scored, name: str | None) -> float:
    """The task reward of a scored response: the component `name` of its score, or the whole score for None.

    0 for a faulty response (MODEL_FAULT) without that component. Raises ConfigError if another response lacks it.
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


def in_zero_variance_group(scored: Sequence[Scored], counted: Tensor, config: PPOConfig) -> Tensor:
    """[R] bool: responses in a group whose counted responses all have the same task reward. `counted`: [R] bool.

    True also for the only response of a group, which has nothing to be compared with.
    """
    task_rewards = [
        task_reward_of(s, config.task_reward) if counts else 0.0 for s, counts in zip(scored, counted, strict=True)
    ]
    return zero_variance_groups(torch.tensor(task_rewards, dtype=torch.float64), group_ids(scored), counted)


def groups_of_step(scored: Sequence[Scored], config: PPOConfig) -> list[tuple[list[Scored], bool]]:
    """The responses to each prompt of a rollout, and whether they are a group of zero variance."""
    equal = in_zero_variance_group(scored, counted_mask(scored, config), config).tolist()
    size = config.sampled_per_prompt
    starts = range(0, len(scored), size)
    return [(list(scored[start : start + size]), all(equal[start : start + size])) for start in starts]


def counted_responses(experience: Experience) -> list[int]:
    """Indices of the responses with at least one token in the mask."""
    return [i for i, part in enumerate(experience.mask.split(list(experience.lengths))) if part.any()]


def sequence_kl(experience: Experience) -> list[float | None]:
    """Sum of k1 over the masked-in tokens of each response, in nats; None in a run without a reference."""
    if experience.reference_logprobs is None:
        return [None] * len(experience.lengths)
    per_token = k1(experience.old_logprobs, experience.reference_logprobs)
    return list(segment_sum(torch.where(experience.mask, per_token, 0.0), experience.lengths).tolist())
