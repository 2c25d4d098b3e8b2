"""Models beside the policy that may follow it: the reference, from which the KL is measured, and its moving average."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from proximo.config.ppo.options import PPOConfig
from proximo.models.heads import Divergence, full_divergence, full_kl, token_logprobs
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses
from proximo.models.scalar import ScalarModel
from proximo.ppo.roles.worker import ReferencePass, RoleWorker, logprobs_of, over_batches
from proximo.ppo.train_state import TrainState
from proximo.records import Response
from proximo.rollout.engine import Engine


class ReferenceWorker(RoleWorker[LanguageModel]):
    """The worker of the reference: a frozen model, which may follow the policy.

    Under LoRA it is the policy's own base.
    """

    role = "reference"

    def __init__(self, model: LanguageModel, config: PPOConfig, *, engine: Engine | None = None) -> None:
        """`engine`: samples from the reference in evaluations; None if they do not need it."""
        super().__init__(model)
        self.config = config
        self.engine = engine

    @property
    def saved_models(self) -> dict[str, LanguageModel | ScalarModel]:
        return {} if self.config.kl.reference_every_steps is None else {self.role: self.model}

    def logprobs(self, responses: Sequence[Response], policy: RoleWorker[LanguageModel] | None = None) -> ReferencePass:
        """[T] log-probs of the reference, and with `policy` the [T] full KL over the vocabulary, else None."""
        if policy is None:
            return ReferencePass(logprobs_of(self.model, responses, self.config))
        learner, temperature = policy.model, self.config.rollout.temperature

        def run(batch: PackedResponses) -> Tensor:
            """[N, 2] log-probs and full KL, from one pass of each model."""
            own, hidden = self._hidden(batch), learner.hidden_states(batch.packed, batch.predictors)
            tokens = token_logprobs(own, self.model.head, batch.targets, temperature=temperature)
            divergence = full_kl(hidden, learner.head, own, self.model.head, temperature=temperature)
            return torch.stack([tokens.logprobs, divergence], dim=-1)

        def run_with_both(batch: PackedResponses) -> Tensor:
            return learner.backbone.run_pass(lambda: run(batch))

        with learner.backbone.at_work():
            both = over_batches(responses, run_with_both, self.model, self.config)
        logprobs, divergences = both.unbind(-1)
        return ReferencePass(logprobs, divergences)

    def divergence(self, policy: LanguageModel, hidden: Tensor, batch: PackedResponses) -> Divergence:
        """The policy against the reference over the whole vocabulary at each of N states, in chunks.

        `hidden`: [N, D] states of the policy.
        """
        temperature = self.config.rollout.temperature
        return self.model.backbone.run_pass(
            lambda: full_divergence(hidden, policy.head, self._hidden(batch), self.model.head, temperature=temperature)
        )

    def follow(self, state: TrainState, policy: RoleWorker[LanguageModel]) -> None:
        """Move towards the policy by `kl.reference_decay`, every `kl.reference_every_steps` steps."""
        every = self.config.kl.reference_every_steps
        if every is not None and state.steps_done % every == 0:
            follow(self.model.model, policy.model.model, decay=self.config.kl.reference_decay)

    @torch.no_grad()
    def _hidden(self, batch: PackedResponses) -> Tensor:
        return self.model.hidden_states(batch.packed, batch.predictors)


class AverageWorker(RoleWorker[LanguageModel]):
    """The moving average of the policy. `evaluate_average` evaluates it instead of the policy."""

    role = "average"

    def __init__(self, model: LanguageModel, config: PPOConfig, *, engine: Engine) -> None:
        """`engine`: samples from the average in evaluations."""
        super().__init__(model)
        self.decay = config.average_decay or 0.0
        self.engine = engine

    @property
    def saved_models(self) -> dict[str, LanguageModel | ScalarModel]:
        return {self.role: self.model}

    def move(self, policy: RoleWorker[LanguageModel]) -> None:
        """Move the average towards the policy by `average_decay`."""
        follow(self.model.model, policy.model.model, decay=self.decay)


@torch.no_grad()
def follow(follower: nn.Module, leader: nn.Module, *, decay: float) -> None:
    """follower <- decay * follower + (1 - decay) * leader, parameter by parameter, in place; 0 copies, bit for bit.

    Buffers are copied. Both have the same architecture; a parameter that is tied to another one moves once.
    """
    leading = dict(leader.named_parameters())
    for name, parameter in follower.named_parameters():
        if decay == 0:
            parameter.copy_(leading[name])
        else:
            parameter.lerp_(leading[name].to(parameter), 1 - decay)
    buffers = dict(leader.named_buffers())
    for name, buffer in follower.named_buffers():
        buffer.copy_(buffers[name])
