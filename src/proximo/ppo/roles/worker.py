"""The base class of workers, with a model's passes over responses, and the workers that no update trains.

These are the reference, from which the KL is measured, the moving average of the policy, and the reward.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from proximo.checkpoint.ranks import RankWriter, Writer
from proximo.checkpoint.reading import Checkpoint
from proximo.config.ppo.options import PPOConfig
from proximo.data.rendering import render_for
from proximo.data.tokenise import TextEncoder
from proximo.distributed.world import current
from proximo.errors import ConfigError, DataError
from proximo.learner.update import Learner
from proximo.models.heads import Divergence, full_divergence, token_logprobs
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, packed_length, plan_shares, shareable_prefixes
from proximo.models.precision.compute import casting
from proximo.models.scalar import ScalarModel
from proximo.ppo.selection import check_scored_fraction
from proximo.ppo.train_state import TrainState
from proximo.ppo.update.epochs import pack_members
from proximo.records import Finish, Prompt, Response, Scored, ScoreState
from proximo.rewards.source import EagerSource, NoReward, RewardSource, checked_scores, is_eager
from proximo.rollout.engine import Engine
from proximo.rollout.vllm.scoring import served_logprobs
from proximo.rollout.vllm.server import VLLMServer
from proximo.run.checkpointing import restore_models, writers_for

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

Model = TypeVar("Model", bound=LanguageModel | ScalarModel)


class RoleWorker(Generic[Model]):
    """The worker of a role, on one device. Its calls move batches to that device and return records on the CPU."""

    role: ClassVar[str]

    def __init__(self, model: Model, learner: Learner | None = None) -> None:
        """`learner`: None for a role that is not trained on its own."""
        self.model = model
        self.learner = learner

    @property
    def saved_models(self) -> dict[str, LanguageModel | ScalarModel]:
        """Folder in a checkpoint -> model of this role."""
        return {} if self.learner is None else {self.role: self.model}

    @property
    def learners(self) -> dict[str, Learner]:
        """Role -> learner; empty for a role without one."""
        return {} if self.learner is None else {self.role: self.learner}

    def writers(self, tokenizer: "PreTrainedTokenizerBase") -> dict[str, Writer | RankWriter]:
        """Name -> writer of this role's models and optimizer into a checkpoint."""
        return writers_for(self.saved_models, self.learners, tokenizer)

    def state(self) -> dict[str, Any]:
        """Other state of this role for a checkpoint, as JSON values."""
        return {}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore what `writers` and `state` saved, bit for bit."""
        restore_models(checkpoint, self.saved_models, self.learners)


class LogprobsAndValues(NamedTuple):
    """What one pass through a shared trunk gives."""

    logprobs: Tensor
    """[T] log-probs of the response tokens."""
    values: Tensor
    """[T + R] values before each response token and after the last one, in units of the return."""


class ReferencePass(NamedTuple):
    """What the reference says of the responses."""

    logprobs: Tensor
    """[T] log-probs of the response tokens."""
    full_kl: Tensor | None = None
    """[T] KL over the whole vocabulary at each state; None where it is not measured."""


@torch.no_grad()
def over_batches(
    responses: Sequence[Response],
    run: Callable[[PackedResponses], Tensor],
    model: LanguageModel | ScalarModel,
    config: PPOConfig,
    *,
    extra: int = 0,
) -> Tensor:
    """Apply `run` to balanced batches, and return its rows in the order of the responses, on the CPU.

    `extra`: rows per response in addition to one per token. Results are copied to the CPU once at the end, so that no
    batch waits for the previous one. On several ranks each computes its share, and every rank gets all rows.
    """
    world = current()
    plans = plan_shares(
        [packed_length(response.sequences) for response in responses],
        token_budget=config.tokens_per_microbatch,
        num_ranks=world.size,
        prefixes=shareable_prefixes([r.prompt.token_ids for r in responses]),
    )
    results = []
    with casting(), model.backbone.at_work():
        for indices in plans[world.rank]:
            batch = pack_members(responses, indices, device=model.device)
            rows = model.backbone.run_pass(partial(run, batch))
            results.append(rows if indices else rows[:0])
    rows = world.gather_rows(torch.cat(results), what="what a model gives for the responses")
    order = [index for plan in plans for indices in plan for index in indices]
    sizes = [len(responses[index].token_ids) + extra for index in order]
    pieces = dict(zip(order, rows.split(sizes), strict=True))
    return torch.cat([pieces[index] for index in range(len(responses))])


def logprobs_of(
    model: LanguageModel, responses: Sequence[Response], config: PPOConfig, *, among_all: bool = False
) -> Tensor:
    """[T] log-probs of the response tokens at the temperature of the rollout.

    `among_all`: over the whole vocabulary, for a model that did not draw them. Else over what they were drawn from.
    """
    temperature = config.rollout.temperature

    def run(batch: PackedResponses) -> Tensor:
        batch = replace(batch, sampling_mask=None) if among_all else batch
        return model.response_logprobs(batch, temperature=temperature).logprobs

    return over_batches(responses, run, model, config)


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
            return ReferencePass(logprobs_of(self.model, responses, self.config, among_all=True))
        learner, temperature = policy.model, self.config.rollout.temperature

        def run(batch: PackedResponses) -> Tensor:
            """[N, 2] log-probs and full KL, from one pass of each model."""
            own, hidden = self._hidden(batch), learner.hidden_states(batch.packed, batch.predictors)
            tokens = token_logprobs(own, self.model.head, batch.targets, temperature=temperature)
            divergence = full_divergence(hidden, learner.head, own, self.model.head, temperature=temperature).kl
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
        kl = self.config.kl
        if kl.reference_every_steps is not None and state.steps_done % kl.reference_every_steps == 0:
            follow(self.model.model, policy.model.model, decay=kl.reference_decay)

    @torch.no_grad()
    def _hidden(self, batch: PackedResponses) -> Tensor:
        return self.model.hidden_states(batch.packed, batch.predictors)


class ServedReferenceWorker:
    """The worker of a reference on vLLM servers that run already. It has no model, and nothing to save."""

    role: ClassVar[str] = "reference"

    def __init__(self, servers: Sequence[VLLMServer], *, model_name: str = "") -> None:
        """`servers`: all of one model, with the policy's token ids; on other ranks than 0 none. `close` closes them.

        `model_name`: last part of the name under which they were started, which a resumed run compares.
        """
        self.servers = tuple(servers)
        self.model_name = model_name

    def logprobs(self, responses: Sequence[Response]) -> ReferencePass:
        """[T] log-probs of the reference at temperature 1. Rank 0 asks for them, and every rank gets them.

        Raises TrainingError if they cannot be had.
        """
        sequences = [sequence for response in responses for sequence in response.sequences]
        found = current().on_rank_0(lambda: served_logprobs(self.servers, sequences), what="log-probs of servers")
        return ReferencePass(found)

    def close(self) -> None:
        """Close the connections to the servers, which keep running."""
        for server in self.servers:
            server.close()


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


class RewardWorker:
    """The worker of the reward: scores responses and the answers that serve as their baselines."""

    role = "reward"

    def __init__(self, source: RewardSource | None, tokenizer: "PreTrainedTokenizerBase", config: PPOConfig) -> None:
        """`source`: None if the caller of the trainer passes scores."""
        self.source = source
        self.tokenizer = tokenizer
        self.config = config

    @property
    def is_scored(self) -> bool:
        """False for `NoReward`, whose scores mean nothing."""
        return not isinstance(self.source, NoReward)

    def score(self, responses: Sequence[Response], greedy: Sequence[Response], state: TrainState) -> list[Scored]:
        """Score the responses, and the baseline answers if the configuration has them.

        `greedy`: the greedy response to each prompt if that is the baseline, else none.

        Raises TrainingError if more than `guards.max_unscored_fraction` of the responses are unscored.
        """
        scored = self._ask(responses)
        if self.config.baseline_answer == "reference":
            prompts = {response.prompt.id: response.prompt for response in responses}
            scored = self.with_answer_scores(scored, answer_responses(list(prompts.values()), self.tokenizer))
        elif self.config.baseline_answer == "greedy":
            scored = self.with_answer_scores(scored, greedy)
        check_scored_fraction(scored, self.config.guards, where=f"step {state.steps_done + 1}")
        return scored

    def with_answer_scores(self, scored: Sequence[Scored], answers: Sequence[Response]) -> list[Scored]:
        """The responses with the score of their prompt's baseline, the first of `answers` to it.

        If a baseline is unscored, its responses become unscored, too.
        """
        once: dict[str, Response] = {}
        for answer in answers:
            once.setdefault(answer.prompt.id, answer)
        known = dict(zip(once, self._ask(list(once.values())), strict=True))
        return [_with_answer(s, known[s.response.prompt.id]) for s in scored]

    def on_finished(self) -> Callable[[Response], None] | None:
        """The callback for complete responses, if the source of now is eager; else None."""
        return eager_begin(self.source)

    def _ask(self, responses: Sequence[Response]) -> list[Scored]:
        if self.source is None:
            raise ConfigError("this trainer has no reward source: pass scores, or pass reward to train")
        return checked_scores(self.source, responses)


def eager_begin(source: RewardSource | None) -> Callable[[Response], None] | None:
    """The callback for complete responses, if the source is eager; else None."""
    return source.begin if isinstance(source, EagerSource) and is_eager(source) else None


def _with_answer(scored: Scored, answer: Scored) -> Scored:
    if answer.valid or not scored.valid:
        return replace(scored, answer_score=answer.score)
    return replace(
        scored,
        state=ScoreState.INFRASTRUCTURE_FAULT,
        reason=f"the answer that it is compared with was not scored: {answer.reason}",
    )


def check_answers(prompts: Sequence[Prompt]) -> None:
    """Raises DataError if a prompt has no reference answer."""
    missing = [prompt.id for prompt in prompts if prompt.answer is None]
    if missing:
        raise DataError(
            f"score.minus_reference_answer needs a reference answer to every prompt, but {len(missing)} of "
            f"{len(prompts)} have none, first of them prompt {missing[0]!r}: name the column that holds it "
            "(in the source: `columns: {answer: <column>}`), or leave those rows out"
        )


def answer_responses(prompts: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase") -> list[Response]:
    """Each prompt's reference answer as a finished response, tokenised as training on it would be.

    Raises DataError if a prompt has no reference answer.
    """
    check_answers(prompts)
    encoder = TextEncoder(tokenizer)
    return [_response(prompt, str(prompt.answer), encoder) for prompt in prompts]


def _response(prompt: Prompt, answer: str, encoder: TextEncoder) -> Response:
    is_readable = prompt.messages is not None or prompt.text is not None
    # Only the answer's tokens are used; what they are depends on what they stand behind.
    readable = prompt if is_readable else replace(prompt, text=encoder.text(prompt.token_ids))
    _, token_ids = render_for(encoder, readable, answer)
    return Response(
        prompt=prompt,
        sample_index=0,
        token_ids=token_ids,
        logprobs=torch.empty(0),
        response_mask=torch.ones(len(token_ids), dtype=torch.bool),
        finish=Finish.EOS,
        policy_version=0,
        text=answer,
    )
