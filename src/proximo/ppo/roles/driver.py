"""Handlers of the calls of a PPO step without a role. They are pure and run in the trainer's process."""

from collections.abc import Sequence
from typing import Any

import torch

from proximo.config.ppo.options import PPOConfig
from proximo.dataflow.executor import Handler
from proximo.ppo.experience import make_experience
from proximo.ppo.scores import check_constant_rewards, keep_best
from proximo.ppo.train_state import TrainState
from proximo.records import Passes, Response, Scored
from proximo.run.memory import release_cache


def driver_handlers(state: TrainState, config: PPOConfig, *, device: torch.device) -> dict[str, Handler]:
    """Name of a call -> handler, for the step that starts from `state`. `device`: the policy's device."""

    def experience(scored: Sequence[Scored], old: Any, reference: Any, full: Any, values: Any) -> tuple[Any, ...]:
        if config.release_cache:  # returns the memory of the rollout's KV cache to the device before the updates
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
        check_scores(candidates)  # before the selection: the best of n may well have equal scores
        scored = keep_best(candidates, config)
        return [s.response for s in scored], scored

    def check_scores(sampled: Sequence[Scored]) -> None:
        equal = state.constant_reward_steps.after(sampled, task_reward=config.task_reward)
        check_constant_rewards(equal, config.guards, step=state.steps_done + 1)

    return {
        "sampled_logprobs": lambda responses: (torch.cat([response.logprobs for response in responses]),),
        "experience": experience,
        "select": select,
    }
