"""The model function calls of a PPO step that do not train: sampling, scoring, log-probs, values. Not their order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from proximo.algorithms.segments import value_positions
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ConfigError
from proximo.models.batching import plan_batches
from proximo.models.heads import full_kl, token_logprobs
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, pack_responses
from proximo.models.precision.compute import casting
from proximo.models.scalar import ScalarModel
from proximo.models.sharing.trunk import is_on_trunk
from proximo.ppo.roles.value_scale import ValueScale
from proximo.records import Prompt, Response, Scored
from proximo.rewards.source import EagerSource, RewardSource
from proximo.rollout.engine import Engine
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.run.user_code import ask


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """Who does what in a step."""

    policy: LanguageModel
    reference: LanguageModel | None
    """None where the KL has no place. Under LoRA the policy's base, over the policy's own tensors."""
    value: ScalarModel | None
    engine: Engine
    reference_engine: Engine | None = None
    """Samples from the reference; None where nobody asks it."""

    @property
    def shares_trunk(self) -> bool:
        """True where the value model is a head on the policy's own layers."""
        return self.value is not None and is_on_trunk(self.value, self.policy)


class InferenceCalls:
    """Handlers of the calls that only read the models."""

    def __init__(self, roles: Roles, reward: RewardSource | None, config: PPOConfig) -> None:
        self.roles = roles
        self.reward = reward
        self.config = config
        self.value_scale = ValueScale(roles.value, config.value_loss)

    def generate(
        self, prompts: Sequence[Prompt], *, key: RandomKey, policy_version: int, greedy: bool = False
    ) -> list[Response]:
        """Sample the configured number of responses to each prompt; `greedy` takes the most likely tokens."""
        return self.roles.engine.generate(
            prompts,
            num_samples=self.config.sampled_per_prompt,
            options=sampling_options(self.config, greedy=greedy),
            key=key,
            policy_version=policy_version,
            on_finished=self.reward.begin if isinstance(self.reward, EagerSource) else None,
        )

    def generate_greedy(self, prompts: Sequence[Prompt], *, key: RandomKey) -> tuple[list[Response]]:
        """The most likely response to each prompt."""
        options = sampling_options(self.config, greedy=True)
        return (self.roles.engine.generate(prompts, num_samples=1, options=options, key=key),)

    def score(self, responses: Sequence[Response]) -> tuple[list[Scored]]:
        """Ask the reward source."""
        if self.reward is None:
            raise ConfigError("this trainer has no reward source: bring scores, or pass reward to train")
        return (ask(self.reward, responses),)

    def sampled_logprobs(self, responses: Sequence[Response]) -> tuple[Tensor]:
        """[T] what the engine recorded while it sampled."""
        return (torch.cat([response.logprobs for response in responses]),)

    @torch.no_grad()
    def policy_logprobs(self, responses: Sequence[Response]) -> tuple[Tensor]:
        """[T] of the policy as it stands."""
        return (self._over_batches(responses, self._logprobs_of(self.roles.policy), self.roles.policy),)

    def with_logprobs(self, responses: Sequence[Response]) -> list[Response]:
        """The same where all have their log-probs; else all with those that the policy gives them."""
        if all(len(response.logprobs) == len(response.token_ids) for response in responses):
            return list(responses)
        (logprobs,) = self.policy_logprobs(responses)
        pieces = logprobs.split([len(response.token_ids) for response in responses])
        return [replace(response, logprobs=piece) for response, piece in zip(responses, pieces, strict=True)]

    @torch.no_grad()
    def reference_logprobs(self, responses: Sequence[Response]) -> tuple[Tensor, Tensor | None]:
        """[T] of the reference; and [T] the KL over the whole vocabulary where it is measured."""
        if self.config.kl.estimator == "full" and self.config.kl.apply_to == "reward":
            logprobs, divergence = self._over_batches(responses, self._reference_and_full_kl, self._reference).unbind(
                -1
            )
            return logprobs, divergence
        return self._over_batches(responses, self._logprobs_of(self._reference), self._reference), None

    @torch.no_grad()
    def values(self, responses: Sequence[Response]) -> tuple[Tensor]:
        """[T + R]: V before each response token, and after the last one, in units of the return."""
        model = self.roles.value
        if model is None:
            raise ValueError("there is no value model in this run")
        return (self.value_scale.values(self._over_batches(responses, model.response_values, model, extra=1)),)

    @torch.no_grad()
    def policy_logprobs_and_values(self, responses: Sequence[Response]) -> tuple[Tensor, Tensor]:
        """[T] and [T + R] as from the two calls, by one pass through the trunk that policy and value share."""
        policy, value, temperature = self.roles.policy, self.roles.value, self.config.rollout.temperature
        if value is None or not self.roles.shares_trunk:
            raise ValueError("the value model of this run is not on the policy's trunk")

        def run(batch: PackedResponses) -> Tensor:
            """[N + S, 2]: the log-prob of the token that follows, 0 after the last one; and the value."""
            hidden = policy.hidden_states(batch.packed)
            found = token_logprobs(hidden[batch.predictors], policy.head, batch.targets, temperature=temperature)
            logprobs = found.logprobs.new_zeros(len(batch.value_positions))
            logprobs[value_positions(batch.response_lengths, device=logprobs.device)] = found.logprobs
            return torch.stack([logprobs, value.scores(hidden[batch.value_positions])], dim=-1)

        both = self._over_batches(responses, run, policy, extra=1)
        before_tokens = value_positions([len(response.token_ids) for response in responses])
        return both[before_tokens, 0], self.value_scale.values(both[:, 1])

    def full_kl(self, hidden: Tensor, batch: PackedResponses) -> Tensor:
        """[N] KL of the policy, whose hidden states [N, D] are given, from the reference at each state, in chunks."""
        return self._full_kl(hidden, self._reference_hidden(batch))

    def _reference_hidden(self, batch: PackedResponses) -> Tensor:
        with torch.no_grad():
            return self._reference.hidden_states(batch.packed, batch.predictors)

    def _full_kl(self, hidden: Tensor, reference_hidden: Tensor) -> Tensor:
        policy, reference = self.roles.policy, self._reference
        temperature = self.config.rollout.temperature
        return full_kl(hidden, policy.head, reference_hidden, reference.head, temperature=temperature)

    def _reference_and_full_kl(self, batch: PackedResponses) -> Tensor:
        """[N, 2]: the reference's log-probs and the KL, from one pass of each model."""
        policy, reference = self.roles.policy, self._reference
        reference_hidden, temperature = self._reference_hidden(batch), self.config.rollout.temperature
        hidden = policy.hidden_states(batch.packed, batch.predictors)
        found = token_logprobs(reference_hidden, reference.head, batch.targets, temperature=temperature)
        return torch.stack([found.logprobs, self._full_kl(hidden, reference_hidden)], dim=-1)

    @property
    def _reference(self) -> LanguageModel:
        if self.roles.reference is None:
            raise ValueError("there is no reference in this run")
        return self.roles.reference

    def _logprobs_of(self, model: LanguageModel) -> Callable[[PackedResponses], Tensor]:
        temperature = self.config.rollout.temperature
        return lambda batch: model.response_logprobs(batch, temperature=temperature).logprobs

    def _over_batches(
        self,
        responses: Sequence[Response],
        run: Callable[[PackedResponses], Tensor],
        model: LanguageModel | ScalarModel,
        *,
        extra: int = 0,
    ) -> Tensor:
        """`run` on balanced batches on the model's device, its pieces back in the order of the responses, on the CPU.

        They are fetched together, so that no batch waits for what the one before found.
        """
        lengths = [len(r.prompt.token_ids) + len(r.token_ids) for r in responses]
        plan = plan_batches(lengths, token_budget=self.config.tokens_per_microbatch)
        with casting():
            found = [run(pack_members(responses, indices, device=model.device)) for indices in plan]
        order = [index for indices in plan for index in indices]
        sizes = [len(responses[index].token_ids) + extra for index in order]
        pieces = dict(zip(order, torch.cat(found).cpu().split(sizes), strict=True))
        return torch.cat([pieces[index] for index in range(len(responses))])


def pack_members(responses: Sequence[Response], indices: Sequence[int], *, device: torch.device) -> PackedResponses:
    """The chosen responses behind their prompts, packed."""
    chosen = [responses[i] for i in indices]
    return pack_responses([r.prompt.token_ids for r in chosen], [r.token_ids for r in chosen], device=device)


def sampling_options(config: PPOConfig, *, greedy: bool = False) -> SamplingOptions:
    """How the engine samples under this configuration."""
    rollout = config.rollout
    return SamplingOptions(
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_new_tokens=rollout.min_new_tokens,
        max_new_tokens=rollout.max_new_tokens,
        random_limit_min=rollout.random_limit_min,
        stop_token_ids=rollout.stop_token_ids,
        stop_strings=rollout.stop_strings,
        greedy=greedy or rollout.greedy,
    )
