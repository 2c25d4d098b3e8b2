"""Compares the engine with the learner: after each push of weights, and before anything of a step is trained."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from proximo.algorithms.behaviour import unexplained_difference
from proximo.errors import GuardError, TrainingError
from proximo.metrics.values import Last, MetricValue
from proximo.ppo.roles.async_rollouts import RolloutsAhead
from proximo.records import Experience, Prompt, Response
from proximo.rollout.engine import Engine
from proximo.rollout.sampling import RandomKey, SamplingOptions

NUM_CANARIES = 4
"""Prompts of the first rollout on which engine and learner are compared after each push."""
CANARY_TOKENS = 8
PLAIN: dict[str, Any] = dict.fromkeys(("random_limit_min", "top_k", "top_p")) | {"min_new_tokens": 0, "greedy": False}
"""Options with which any engine gives the log-probs of the full softmax."""
NO_LOGPROBS = (
    "the engine gives no log-probs of the tokens that it samples: nothing shows whether it samples with the policy's "
    "weights, and its mismatch can be neither measured nor corrected (mismatch/missing_logprobs)"
)
NUM_MEASURED = 8
"""Responses of a step on which the movement of the policy by its updates is measured."""
NOTHING_COMPARED = (
    "ppo.guards.max_mismatch compares nothing: the engine gives no log-probs of the tokens that it samples. A vLLM "
    "server cannot give them at a temperature other than 1 together with top_k, top_p or min_new_tokens"
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
