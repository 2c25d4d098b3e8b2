"""What samples for the policy: rollouts ahead of the learner, and the checks that it has the learner's weights.

Rank 0 samples ahead, and every rank gets the responses. Engine and learner are compared after each push of weights, and
before anything of a step is trained.
"""

import json
import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proximo.algorithms.behaviour import unexplained_difference
from proximo.distributed.world import current
from proximo.errors import ConfigError, GuardError, TrainingError
from proximo.metrics.values import Last, MetricValue
from proximo.models.language import LanguageModel
from proximo.records import Experience, Prompt, Response
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
from proximo.rollout.sampling import RandomKey, SamplingOptions


class RolloutsAhead:
    """Samples for later steps while the learner trains."""

    def __init__(self, engine: Engine, plan: SamplingPlan, *, copies_weights: bool) -> None:
        """`engine`: that of the policy, or with `copies_weights` another one, which gets its weights from here.

        Raises ConfigError for an engine that cannot be called from several threads.
        """
        self._plan = plan
        self._copies_weights = copies_weights
        own = engine.own if isinstance(engine, FirstRankEngine) else engine
        current().on_rank_0(lambda: _check_thread_safe(own), what="whether the engine may be called from threads")
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
            current().on_rank_0(
                lambda: self._rollouts and self._rollouts.settle(), what="the responses of the next step"
            )

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

        self.taken, message = world.on_rank_0(run, what="the responses of a step")
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


NUM_CANARIES = 4
"""Prompts of the first rollout on which engine and learner are compared after each push."""
CANARY_TOKENS = 8
PLAIN: dict[str, Any] = {"random_limit_min": None, "min_new_tokens": 0, "greedy": False}
"""Options with which engines give the learner's log-probs."""
NO_LOGPROBS = (
    "the engine gives no log-probs of the tokens that it samples: nothing shows whether it samples with the policy's "
    "weights, and its mismatch can be neither measured nor corrected (mismatch/missing_logprobs)"
)
NO_MASK = (
    "ppo.rollout.top_k or top_p is set, and the engine does not say which tokens it left out: the loss takes the "
    "responses for draws among all tokens. A vLLM server that was started elsewhere needs `--sampling-mask`, and a GPU"
)
NUM_MEASURED = 8
"""Responses of a step on which the movement of the policy by its updates is measured."""
NOTHING_COMPARED = (
    "ppo.guards.max_mismatch compares nothing: the engine gives no log-probs of the tokens that it samples. A vLLM "
    "server cannot give them at a temperature other than 1 together with min_new_tokens; on a CPU, with top_k or top_p"
)


def check_engine(
    engine: Engine,
    prompts: Sequence[Prompt],
    logprobs: Callable[[Sequence[Response]], Tensor],
    options: SamplingOptions,
    *,
    seed: int,
    version: int,
) -> None:
    """Sample a few tokens to some prompts. Raises TrainingError if engine and learner disagree on their log-probs.

    Weights may be named rightly and be others, and a cache may hold keys and values of earlier ones. `logprobs`: [T]
    those of the learner, whose weights have this version.
    """
    allowed = engine.max_logprob_error
    if allowed is None:
        return
    options = replace(options, max_new_tokens=min(CANARY_TOKENS, options.max_new_tokens), **PLAIN)
    responses = engine.generate(prompts, num_samples=1, options=options, key=RandomKey(seed=seed, purpose="canary"))
    errors = (torch.cat([response.logprobs for response in responses]) - logprobs(responses)).abs()
    if errors.isnan().all():
        warnings.warn(NO_LOGPROBS, stacklevel=2)
    largest = float(errors.nan_to_num(nan=0.0).max())
    if largest > allowed:
        raise TrainingError(
            f"the engine was given the policy's weights of version {version}, but its log-probs differ from "
            f"the learner's by up to {largest:.3g} on {len(prompts)} prompts of the run ({allowed:g} is allowed): "
            "it samples with other weights, keys and values of earlier ones (a prefix cache that was not reset), "
            "another temperature, or far less precision"
        )


class SamplerGuard:
    """The guard `max_mismatch`: the mean absolute difference of a token's two log-probs beyond what staleness explains.

    Tokens of the current weights differ by rounding alone. Those of earlier weights also by the movement of the policy
    since then, which is measured step by step: |now - sampled| is at most |now - then| + |then - sampled|. Tokens of
    other weights, of which that is not known, are not compared.
    """

    def __init__(self, limit: float | None, ahead: RolloutsAhead | None) -> None:
        """`limit`: in nats per token; None to compare without ending the run."""
        self._limit = limit
        self._ahead = ahead
        self._trained: tuple[list[Response], Tensor] | None = None
        self.unexplained: float | None = None
        """Of the last step, in nats per token; None where no token was compared."""

    def check(self, responses: Sequence[Response], logprobs: Tensor, *, version: int) -> None:
        """Raises GuardError if the responses were not sampled by the weights that they name.

        `logprobs`: [T] those of the learner, whose weights have this version.
        """
        sampled = torch.cat([response.logprobs for response in responses])
        written = torch.cat([response.response_mask for response in responses])
        movement = self._movement(responses, version)
        if self._limit is not None and written.any() and not sampled[written].isfinite().any():
            warnings.warn(NOTHING_COMPARED, stacklevel=2)
        compared = written & sampled.isfinite() & logprobs.isfinite() & movement.isfinite()
        self.unexplained = unexplained_difference(sampled, logprobs, compared, movement)
        if self._limit is None or self.unexplained is None or self.unexplained <= self._limit:
            return
        if self._ahead is not None:
            self._ahead.close()  # what was sampled ahead is by the same weights, and is not to be saved
        explained = "" if self._ahead is None else ", beyond what ppo.rollout.staleness explains"
        raise GuardError(
            f"the log-probs of the engine that sampled differ from the learner's by {self.unexplained:.3g} nats per "
            f"token on average{explained}, more than ppo.guards.max_mismatch = {self._limit:g} allows; nothing was "
            "trained on these responses. Likely causes: somebody else changed the weights of a server (another run "
            "that uses it, or a start by hand), keys and values of earlier weights in its cache, another temperature "
            "or template, or far less precision. --resume gives the engine the policy's weights again; where such a "
            "difference is meant, as with a quantised engine, raise the limit, or set it to null"
        )

    def trained(self, experience: Experience) -> None:
        """Keep some responses of a step with the log-probs that they had before its updates."""
        if self._ahead is None:
            return
        count = len(experience.scored)
        rows = range(0, count, max(1, count // NUM_MEASURED))[:NUM_MEASURED]
        parts = experience.old_logprobs.split(list(experience.lengths))
        kept = [(experience.scored[row].response, parts[row]) for row in rows if experience.lengths[row]]
        if kept:
            self._trained = [response for response, _ in kept], torch.cat([part for _, part in kept])

    def measure(self, logprobs: Callable[[Sequence[Response]], Tensor], *, version: int) -> None:
        """Measure how far the updates since `trained` moved the policy, to weights of this version."""
        if self._trained is None:
            return
        (responses, before), self._trained = self._trained, None
        assert self._ahead is not None, "nothing is kept without sampling ahead"
        self._ahead.moved(version, float((logprobs(responses) - before).abs().mean()))

    def metrics(self, version: int) -> dict[str, MetricValue]:
        """What was compared in the last step, and how far its updates moved the policy, now of this version."""
        found: dict[str, MetricValue] = {}
        if self.unexplained is not None:
            found["mismatch/unexplained"] = Last(self.unexplained)
        if self._ahead is not None and (moved := self._ahead.moved_to(version)) is not None:
            found["staleness/movement"] = Last(moved)
        return found

    def _movement(self, responses: Sequence[Response], version: int) -> Tensor:
        """[T] how far the policy moved since the weights that drew each token, in nats; NaN where it is not known."""
        if self._ahead is not None:
            return self._ahead.movement(responses, version=version)
        moved = [
            0.0 if response.policy_version == version else torch.nan
            for response in responses
            for _ in response.token_ids
        ]
        return torch.tensor(moved, dtype=torch.float32)
