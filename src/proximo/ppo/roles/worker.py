"""The base class of workers: a role's model on its device, its learner, its state, and its passes over responses."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from proximo.checkpoint.ranks import RankWriter, Writer
from proximo.checkpoint.reading import Checkpoint
from proximo.config.ppo.options import PPOConfig
from proximo.distributed.world import current
from proximo.learner.update import Learner
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, plan_shares, shareable_prefixes
from proximo.models.precision.compute import casting
from proximo.models.precision.placement import Precision
from proximo.models.scalar import ScalarModel
from proximo.ppo.update.epochs import pack_members
from proximo.records import Response
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
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    @property
    def precision(self) -> Precision:
        """The precision that the model computes in."""
        return self.model.precision

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
        [len(r.prompt.token_ids) + len(r.token_ids) for r in responses],
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


def logprobs_of(model: LanguageModel, responses: Sequence[Response], config: PPOConfig) -> Tensor:
    """[T] log-probs of the response tokens at the temperature of the rollout."""
    temperature = config.rollout.temperature
    return over_batches(
        responses, lambda batch: model.response_logprobs(batch, temperature=temperature).logprobs, model, config
    )
