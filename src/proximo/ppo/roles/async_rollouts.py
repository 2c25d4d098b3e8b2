"""Asynchronous rollouts of the policy on all ranks: rank 0 samples ahead, and every rank gets the responses."""

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from proximo.rollout.rank_transfers import as_sent, from_bytes, to_bytes
from proximo.rollout.ranks_engine import FirstRankEngine


class RolloutsAhead:
    """Samples for later steps while the learner trains."""

    def __init__(self, engine: Engine, plan: SamplingPlan, *, copies_weights: bool) -> None:
        """`engine`: that of the policy, or with `copies_weights` another one, which gets its weights from here.

        Raises ConfigError for an engine that cannot be called from several threads.
        """
        self._plan = plan
        self._copies_weights = copies_weights
        own = engine.own if isinstance(engine, FirstRankEngine) else engine
        current().once(lambda: _check_thread_safe(own), what="whether the engine may be called from threads")
        self._rollouts = AsyncRollouts(own, plan) if current().leads else None
        self._step_of: dict[int, int] = {}
        """Version -> the last step that trained these weights."""
        self._moved: dict[int, float] = {}
        """Version -> mean absolute change of a token's log-prob from the weights before to these, in nats."""
        self.taken: Rollouts | None = None
        """What the last step learned from."""
        self._resumed: bytes | None = None
        """The responses that a checkpoint kept."""

    def before_push(self) -> None:
        """Wait for all that is being sampled, if one step ahead is allowed.

        So all tokens of a response are of one version, and a run gives the same bits each time. The price: the batch of
        the step after the next one is not sampled beside it.
        """
        if self._plan.staleness == 1:
            current().once(lambda: self._rollouts and self._rollouts.settle(), what="the responses of the next step")

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
        oldest = step - self._plan.staleness
        self._step_of = {each: done for each, done in self._step_of.items() if done >= oldest} | {version: step}
        self._moved = {each: nats for each, nats in self._moved.items() if each > min(self._step_of)}
        self._put_resumed(prompts_of)
        world = current()
        kept: list[Response] = []

        def run() -> tuple[Rollouts, bytes]:
            assert self._rollouts is not None, "rank 0 samples"
            taken = self._rollouts.take(step, prompts_of, on_finished=on_finished)
            if world.size == 1:
                return taken, b""
            kept[:] = taken.responses
            return replace(taken, responses=()), self._as_bytes(kept)

        self.taken, message = world.once(run, what="the responses of a step")
        if world.size > 1:
            sent = [response for _, response in from_bytes(message, prompts_of(step))]
            self.taken = replace(self.taken, responses=tuple(as_sent(kept, sent) if kept else sent))
        return list(self.taken.responses)

    def steps_behind(self, responses: Sequence[Response], *, step: int) -> Tensor:
        """[T] int64: how many steps before `step` the weights were trained last that drew each token."""
        versions = _versions(responses)
        # Steps on responses of the caller's own, between two that sample, push versions that are not noted here.
        known = sorted(self._step_of)
        trained = {each: self._step_of[known[max(0, bisect_right(known, each) - 1)]] for each in set(versions)}
        return step - torch.tensor([trained[version] for version in versions])

    def moved(self, version: int, nats: float) -> None:
        """The updates of a step moved the log-prob of a token by so much on average, to weights of this version."""
        if version not in self._step_of:  # else every update was skipped
            self._moved[version] = nats

    def moved_to(self, version: int) -> float | None:
        """How far the weights of this version are from those before, in nats per token; None if it is not known."""
        return self._moved.get(version)

    def movement(self, responses: Sequence[Response], *, version: int) -> Tensor:
        """[T] nats by which a token's log-prob moved at most, on average, from the weights that drew it to `version`.

        NaN for weights since which the movement is not known.
        """
        known = {version: 0.0} | {
            each: sum(nats for other, nats in self._moved.items() if other > each)
            for each in self._step_of
            if all(other in self._moved for other in self._step_of if other > each)
        }
        moved = [known.get(each, torch.nan) for each in _versions(responses)]
        return torch.tensor(moved, dtype=torch.float32)

    def state(self) -> dict[str, Any]:
        """For a checkpoint, beside `write`: versions of weights, with the last step that trained them, and how far each
        is from the one before."""
        return {
            "trained": [[version, step] for version, step in self._step_of.items()],
            "moved": [[version, nats] for version, nats in self._moved.items()],
        }

    def write(self, path: Path) -> None:
        """Write the complete responses of later steps. What is still being sampled begins again after a resume."""
        assert self._rollouts is not None, "rank 0 writes"
        complete = self._rollouts.complete()
        responses = [response for step in complete for response in complete[step]]
        path.write_bytes(b"%s\n%s" % (json.dumps(list(complete)).encode(), self._as_bytes(responses)))

    def restore(self, state: Mapping[str, Any], path: Path) -> None:
        """Go on with what `state` and `write` kept."""
        self._step_of = dict(state["trained"])
        self._moved = dict(state["moved"])
        self._resumed = path.read_bytes()

    def _put_resumed(self, prompts_of: PromptsOfStep) -> None:
        """The responses of a checkpoint, once the prompts are known that they answer."""
        if self._resumed is None or self._rollouts is None:
            return
        head, _, message = self._resumed.partition(b"\n")
        steps, self._resumed = json.loads(head), None
        prompts = [prompt for step in steps for prompt in prompts_of(step)]
        responses = [response for _, response in from_bytes(message, prompts)]
        size = len(responses) // len(steps) if steps else 0
        for number, step in enumerate(steps):
            self._rollouts.put(step, responses[number * size : (number + 1) * size])

    def _as_bytes(self, responses: Sequence[Response]) -> bytes:
        size = self._plan.num_samples
        return to_bytes((number // size, response) for number, response in enumerate(responses))

    def close(self) -> None:
        """End the threads. What they were sampling is lost."""
        if self._rollouts is not None:
            self._rollouts.close()


def _versions(responses: Sequence[Response]) -> list[int]:
    """[T] version of the weights that drew each token."""
    return [
        version
        for response in responses
        for version in response.token_versions or (response.policy_version,) * len(response.token_ids)
    ]


def _check_thread_safe(engine: Engine) -> None:
    if not (isinstance(engine, ThreadSafeEngine) and engine.thread_safe):
        raise ConfigError(
            f"ppo.rollout.staleness samples in threads while weights are loaded, and {type(engine).__name__} does not "
            "say that it is thread_safe: see rollout/asynchronous.py::ThreadSafeEngine, or set staleness to 0"
        )
