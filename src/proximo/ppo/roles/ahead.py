"""Asynchronous rollouts of the policy on all ranks: rank 0 samples ahead, and every rank gets the responses."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from proximo.distributed.world import current
from proximo.errors import ConfigError
from proximo.models.language import LanguageModel
from proximo.records import Response
from proximo.rollout.asynchronous import (
    AsyncRollouts,
    PromptsOfStep,
    Rollouts,
    SamplingPlan,
    ThreadSafeEngine,
)
from proximo.rollout.engine import Engine, push_weights
from proximo.rollout.first_rank_engine import FirstRankEngine
from proximo.rollout.response_bytes import from_bytes, to_bytes


class RolloutsAhead:
    """Samples for later steps while the learner trains."""

    def __init__(self, engine: Engine, plan: SamplingPlan, *, copies_weights: bool) -> None:
        """`engine`: that of the policy, or with `copies_weights` another one, which gets its weights from here.

        Raises ConfigError for an engine that cannot be called from several threads.
        """
        self._plan = plan
        self._copies_weights = copies_weights
        own = engine.own if isinstance(engine, FirstRankEngine) else engine
        if current().leads and not (isinstance(own, ThreadSafeEngine) and own.thread_safe):
            raise ConfigError(
                f"rollout.staleness samples in threads while weights are loaded, and {type(own).__name__} does not say "
                "that it is thread_safe: see rollout/asynchronous.py::ThreadSafeEngine, or set staleness to 0"
            )
        self._rollouts = AsyncRollouts(own, plan) if current().leads else None
        self._step_of: dict[int, int] = {}
        """Version -> the last step that trained these weights."""
        self.taken: Rollouts | None = None
        """What the last step learned from."""

    def push(self, model: LanguageModel, *, version: int) -> None:
        """Load the policy's weights into an engine that has its own copy."""
        if self._copies_weights:
            assert self._rollouts is not None, "the built-in engine samples ahead on one rank only"
            tensors = {name: tensor.detach() for name, tensor in model.trainable_parameters()}
            push_weights(self._rollouts.engine, version, tensors)

    def responses(
        self,
        step: int,
        prompts_of: PromptsOfStep,
        *,
        version: int,
        on_finished: Callable[[Response], None] | None,
    ) -> list[Response]:
        """Begin what the bound allows, and wait for the responses of a step, which trains weights of `version`."""
        self._step_of[version] = step
        world = current()
        kept: list[Rollouts] = []

        def run() -> tuple[Rollouts, bytes]:
            assert self._rollouts is not None, "rank 0 samples"
            kept.append(self._rollouts.take(step, prompts_of, on_finished=on_finished))
            if world.size == 1:
                return kept[0], b""
            size = self._plan.num_samples
            numbered = ((number // size, response) for number, response in enumerate(kept[0].responses))
            return replace(kept[0], responses=()), to_bytes(numbered)

        taken, message = world.once(run, what="the responses of a step")
        if not kept:
            sent = from_bytes(message, prompts_of(step))
            kept.append(replace(taken, responses=tuple(response for _, response in sent)))
        self.taken = kept[0]
        return list(self.taken.responses)

    def steps_behind(self, responses: Sequence[Response], *, step: int) -> Tensor:
        """[T] int64: how many steps before `step` the weights were trained last that drew each token."""
        versions = [
            version
            for response in responses
            for version in response.token_versions or (response.policy_version,) * len(response.token_ids)
        ]
        return step - torch.tensor([self._step_of[version] for version in versions])

    def close(self) -> None:
        """End the threads. What they were sampling is lost."""
        if self._rollouts is not None:
            self._rollouts.close()
