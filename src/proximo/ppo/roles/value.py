"""The critic of a PPO run: values, updates, and normalisation of its outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from proximo.algorithms.losses import ValueStatistics
from proximo.algorithms.masking import masked_mean, masked_variance
from proximo.algorithms.value_scale import (
    ReturnMoments,
    ValueUnits,
    cumulative_moments,
    exponential_moments,
    updated_scale,
)
from proximo.checkpoint.ranks import RankWriter, Writer
from proximo.checkpoint.reading import Checkpoint, as_record
from proximo.config.ppo.losses import ExponentialScaleConfig, ValueLossConfig
from proximo.config.ppo.options import PPOConfig
from proximo.learner.update import Learner
from proximo.metrics.values import Last, Mean, MetricValue
from proximo.models.language import LanguageModel
from proximo.models.scalar import ScalarModel
from proximo.ppo.experience import token_values
from proximo.ppo.roles.worker import RoleWorker, over_batches
from proximo.ppo.train_state import TrainState
from proximo.ppo.update.epochs import Epochs, Microbatch, Report, UpdateLog, update_metrics
from proximo.ppo.update.guards import too_many_skipped
from proximo.ppo.update.losses import value_loss
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


class ValueScale:
    """Holds moments of the returns and units of the value model, and rescales its head when they change (PopArt).

    Without normalising, outputs are in units of the return and nothing is rescaled.
    """

    def __init__(self, model: ScalarModel, config: ValueLossConfig) -> None:
        self._model = model
        self._config = config
        self.moments = ReturnMoments()
        self.units = ValueUnits()

    @property
    def is_on(self) -> bool:
        """Whether values are normalised."""
        return self._config.normalise is not None

    def values(self, outputs: Tensor) -> Tensor:
        """Convert outputs of the value model to units of the return. The shape is kept."""
        return self.units.to_values(outputs) if self.is_on else outputs

    def follow(self, values: Tensor, returns: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Update the units with the returns of a step. Returns (outputs, target outputs), [T] each, for the loss.

        `values` and `returns` are [T] in units of the return. The head is rescaled with the units, so that no value
        changes. The exception is an untrained head of zeros, which then predicts the mean of the returns.
        """
        if not self.is_on or not mask.any():
            return values, returns
        is_first = self.moments.weight == 0
        self.moments = self._with_returns(returns.double(), mask)
        outputs, before = self.units.to_outputs(values), self.units
        self.units = updated_scale(before, self.moments, is_first=is_first and self._model.head_is_zero)
        factor = before.scale / self.units.scale
        self._model.scale_head(factor)
        return outputs * factor, self.units.to_outputs(returns)

    @property
    def metrics(self) -> dict[str, MetricValue]:
        """Metrics of the units; empty if values are not normalised."""
        return {"value/scale": Last(self.units.scale), "value/shift": Last(self.units.shift)} if self.is_on else {}

    def state(self) -> dict[str, Any]:
        """State of the normalisation for a checkpoint, as JSON values."""
        return {"moments": asdict(self.moments), "units": asdict(self.units)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`. The head is restored with the model."""
        self.moments = as_record(ReturnMoments, state["moments"])
        self.units = as_record(ValueUnits, state["units"])

    def _with_returns(self, returns: Tensor, mask: Tensor) -> ReturnMoments:
        batch = {"mean": float(masked_mean(returns, mask)), "variance": float(masked_variance(returns, mask))}
        if isinstance(self._config.normalise, ExponentialScaleConfig):
            return exponential_moments(self.moments, **batch, decay=self._config.normalise.decay)
        return cumulative_moments(self.moments, **batch, count=int(mask.sum()))
