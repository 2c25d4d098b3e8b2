"""The calls of a PPO step that have no role: pure ones, which run where the trainer is."""

from collections.abc import Sequence
from typing import Any

import torch

from proximo.config.ppo.options import PPOConfig
from proximo.dataflow.executor import Handler
from proximo.ppo.experience import make_experience
from proximo.ppo.scores import keep_best, refuse_equal
from proximo.ppo.train_state import TrainState
from proximo.records import Passes, Response, Scored
from proximo.run.memory import release_cache


def driver_handlers(state: TrainState, config: PPOConfig, *, device: torch.device) -> dict[str, Handler]:
    """By the name of the call, for the step after `state`; `device` is the policy's."""

    def experience(scored: Sequence[Scored], old: Any, reference: Any, full: Any, values: Any) -> tuple[Any, ...]:
        if config.release_cache:  # the rollout's keys and values are freed, and the updates come next
            release_cache(device)
        if config.samples_per_prompt is None:
            check_scores(scored)
        return make_experience(
            scored,
            Passes(old_logprobs=old, reference_logprobs=reference, full_kl=full, values=values),
            config=config,
            kl_coefficient=state.kl_coefficient,
            moments=state.score_moments,
            returns_seen=state.return_moments,
        )

    def select(candidates: Sequence[Scored]) -> tuple[list[Response], list[Scored]]:
        check_scores(candidates)  # the best of a healthy source may well be equal
        scored = keep_best(candidates, config)
        return [each.response for each in scored], scored

    def check_scores(sampled: Sequence[Scored]) -> None:
        equal = state.equal_steps.after(sampled, task_reward=config.task_reward)
        refuse_equal(equal, config.guards, step=state.steps_done + 1)

    return {
        "sampled_logprobs": lambda responses: (torch.cat([response.logprobs for response in responses]),),
        "experience": experience,
        "select": select,
    }
