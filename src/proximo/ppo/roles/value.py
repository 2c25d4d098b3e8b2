"""The critic of a PPO run: values, updates, and normalisation of its outputs."""

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from proximo.algorithms.losses import ValueStatistics
from proximo.checkpoint.ranks import RankWriter, Writer
from proximo.checkpoint.reading import Checkpoint
from proximo.config.ppo.options import PPOConfig
from proximo.learner.update import Learner
from proximo.metrics.values import Mean, MetricValue
from proximo.models.language import LanguageModel
from proximo.models.scalar import ScalarModel
from proximo.ppo.experience import token_values
from proximo.ppo.roles.passes import over_batches
from proximo.ppo.roles.value_scale import ValueScale
from proximo.ppo.roles.worker import RoleWorker
from proximo.ppo.train_state import TrainState
from proximo.ppo.update.epochs import Epochs, too_many_skipped
from proximo.ppo.update.microbatch import Microbatch
from proximo.ppo.update.reports import Report, UpdateLog, update_metrics
from proximo.ppo.update.value_loss import value_loss
from proximo.records import Experience, Response
from proximo.run.checkpointing import restore_models, writers_for

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase


class ValueWorker(RoleWorker[ScalarModel]):
    """The worker of the critic. With `value_loss.normalise`, the model's outputs are normalised values."""

    role = "value"

    def __init__(
        self,
        model: ScalarModel,
        learner: Learner | None,
        config: PPOConfig,
        *,
        seed: int,
        is_on_trunk: bool = False,
    ) -> None:
        """`is_on_trunk`: the model is a head on the policy's layers, trained alone only during warm-up. Without warm-up
        `learner` is None.
        """
        super().__init__(model, learner)
        self.config = config
        self.is_on_trunk = is_on_trunk
        self.epochs = Epochs(model, config, seed=seed)
        self.scale = ValueScale(model, config.value_loss)

    def values(self, responses: Sequence[Response]) -> Tensor:
        """[T + R] values before each response token and after the last one, in units of the return."""
        outputs = over_batches(responses, self.model.response_values, self.model, self.config, extra=1)
        return self.scale.values(outputs)

    def train(self, experience: Experience, state: TrainState) -> Report:
        """Fit the values to the returns for all epochs, in normalised units if values are normalised.

        The normalisation is updated with the step's returns first. On a shared trunk only the head is trained.
        """
        if self.learner is None:
            raise ValueError("this run has no critic that learns by itself")

        def loss(batch: Microbatch) -> tuple[Tensor, ValueStatistics]:
            with torch.set_grad_enabled(not self.is_on_trunk):
                hidden = self.model.backbone.packed(batch.packed.packed, rows=batch.packed.predictors)
            return self.loss(hidden, batch)

        columns = self.columns(experience)
        taken = self.epochs.take(self.learner, experience, columns, loss, step=state.steps_done)
        guard = too_many_skipped(taken.results, self.config, role=self.role, step=state.steps_done)
        metrics = update_metrics(self.role, taken, taken.num_tokens) | self.metrics(taken)
        return Report(metrics=metrics, refusals=taken.refusals, guard=guard)

    def loss(self, hidden: Tensor, batch: Microbatch) -> tuple[Tensor, ValueStatistics]:
        """The value loss of a micro-batch. `hidden`: [T, D] states before its response tokens."""
        return value_loss(self.model.scores(hidden), batch, self.config.value_loss)

    def columns(self, experience: Experience) -> dict[str, Tensor]:
        """Values and returns for the loss, [T] each, in units updated with the step's returns."""
        if experience.returns is None:
            raise ValueError("this experience was made without a critic")
        values, returns = self.scale.follow(token_values(experience), experience.returns, experience.mask)
        return {"values": values, "returns": returns}

    def metrics(self, taken: UpdateLog[ValueStatistics]) -> dict[str, MetricValue]:
        """Metrics of the updates, except loss, gradient norm and learning rate."""
        totals = reduce(add, (part for result in taken.results for part in result.statistics))
        return {"value/clip_fraction": Mean(totals.clipped.item(), totals.num_tokens.item())} | self.scale.metrics

    @property
    def saved_models(self) -> dict[str, LanguageModel | ScalarModel]:
        return {} if self.is_on_trunk else {self.role: self.model}

    @property
    def _saved_head(self) -> ScalarModel | None:
        return self.model if self.is_on_trunk else None

    def writers(self, tokenizer: "PreTrainedTokenizerBase") -> dict[str, Writer | RankWriter]:
        return writers_for(self.saved_models, self.learners, tokenizer, head=self._saved_head)

    def state(self) -> dict[str, Any]:
        return {"value_scale": self.scale.state()}

    def restore(self, checkpoint: Checkpoint) -> None:
        restore_models(checkpoint, self.saved_models, self.learners, head=self._saved_head)
        self.scale.restore(checkpoint.state["task"]["value_scale"])
