"""Base of SFT, reward model training, DPO and KTO: one trained model, one update per step. Subclasses add the loss."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from proximo.checkpoint.ranks import RankWriter, Writer
from proximo.checkpoint.reading import Checkpoint
from proximo.data.order import rows_at
from proximo.distributed.world import current
from proximo.learner.expert_balance import ExpertBalance
from proximo.learner.update import Learner, UpdateResult
from proximo.message_text import count_of
from proximo.metrics.values import Last, Max, Mean, MetricValue, Sum
from proximo.models.language import LanguageModel
from proximo.models.scalar import ScalarModel
from proximo.run.checkpointing import restore_models, update_counts, writers_for
from proximo.run.make.conversion import optimizer_options, schedule_notes
from proximo.run.memory import peak_memory_mib
from proximo.run.task import Record
from proximo.supervised.recipes import SupervisedConfig

MAX_CONSECUTIVE_SKIPS = 8
"""The run stops after this many consecutive updates with a non-finite loss or gradient: the model has diverged."""
Model = TypeVar("Model", LanguageModel, ScalarModel)
Example = TypeVar("Example")
Batch = TypeVar("Batch")
Result = TypeVar("Result")


Config = TypeVar("Config", bound=SupervisedConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskInputs(Generic[Model, Example, Config]):
    """Model, data and settings of a supervised task."""

    model: Model
    """The model that is trained."""
    tokenizer: PreTrainedTokenizerBase
    examples: Sequence[Example]
    held_out: Sequence[Example]
    config: Config
    seed: int
    fingerprint: Mapping[str, Any]
    """Digests that must be unchanged on resume: data, tokenizer, and a model that checkpoints do not hold."""
    notes: Sequence[str] = ()


class SupervisedTask(ABC, Generic[Model, Example, Config]):
    """Owns the trained model and its learner. A subclass implements one update over given examples."""

    role: ClassVar[str]
    """The model's folder in a checkpoint."""
    metric_group: ClassVar[str]
    """Prefix of the names of the update's metrics."""

    def __init__(self, inputs: TaskInputs[Model, Example, Config]) -> None:
        model, config = inputs.model, inputs.config
        self.model: Model = model
        self.tokenizer = inputs.tokenizer
        self.examples = inputs.examples
        self.held_out = inputs.held_out
        self.config: Config = config
        self.examples_per_step = config.rows_per_update
        self.seed = inputs.seed
        self.inputs_fingerprint = inputs.fingerprint
        self.device = str(model.device)
        self.num_steps = max(1, math.ceil(config.num_epochs * len(self.examples) / self.examples_per_step))
        self.learners = {
            self.role: Learner(
                model.model,
                optimizer_options(config.optimizer),
                num_updates=self.num_steps,
                sharding=model.backbone.sharding,
                balance=ExpertBalance.of(model.backbone),
            )
        }
        self.notes: Sequence[str] = (*inputs.notes, *self._fill_notes(), *schedule_notes(self.learners))
        self.num_skipped_in_a_row = 0

    def _fill_notes(self) -> list[str]:
        """A note of rows that steps read again, because a step is always full."""
        num_rows, size = len(self.examples), self.examples_per_step
        if size > num_rows:
            return [f"the data hold {count_of(num_rows, 'row')}, and each of a step's {size:,} rows is one of them"]
        again = self.num_steps * size - round(self.config.num_epochs * num_rows)
        if again <= 0:
            return []
        return [f"the last step is filled up with {count_of(again, 'row')} of the next pass over the data"]

    @property
    def dropout(self) -> bool:
        """Whether the model trains with its own dropout."""
        return False

    @abstractmethod
    def learn(
        self, examples: Sequence[Example], *, seed: int | None
    ) -> tuple[UpdateResult, dict[str, MetricValue], int]:
        """One update over the examples: its result, this trainer's metrics, and the number of tokens processed.

        `seed`: for dropout; None if there is no dropout.
        """

    def step(self, step: int) -> Record:
        """One update over the next examples in the order of their epoch. The run ends after MAX_CONSECUTIVE_SKIPS
        consecutive skipped updates.
        """
        start = time.perf_counter()
        size = self.examples_per_step
        indices = rows_at((step - 1) * size, size, num_rows=len(self.examples), seed=self.seed)
        # Each micro-batch of each rank adds to this seed, so updates are 65,536 seeds apart.
        seed = (self.seed << 32) + step * 65_536 if self.dropout else None
        result, metrics, num_tokens = self.learn([self.examples[i] for i in indices], seed=seed)
        seconds = time.perf_counter() - start
        skipped, group = result.refusal is not None, self.metric_group
        self._compare_ranks(step, result)
        guard = self._diverged(step, result)
        shared: dict[str, MetricValue] = {
            f"{group}/gradient_norm": Mean(0, 0) if skipped else Mean(result.gradient_norm, 1),
            f"{group}/learning_rate": Last(result.learning_rate),
            f"{group}/skipped_updates": Sum(int(skipped)),
            "progress/updates": Last(self.learners[self.role].updates_done),
            "progress/epoch": Last(step * size / len(self.examples)),
            "time/step_seconds": Sum(seconds),
            "throughput/train_tokens_per_second": Mean(num_tokens, seconds),
            "memory/peak_mib": Max(peak_memory_mib(self.model.device)),
        }
        if result.balancing_loss is not None:
            shared[f"{group}/balancing_loss"] = Mean(0, 0) if skipped else Mean(result.balancing_loss, 1)
        return Record(metrics=metrics | shared, guard=guard)

    def results_of(
        self, batches: Sequence[Batch], run: Callable[[Batch], tuple[Any, ...]], *, what: str = "the evaluation"
    ) -> list[tuple[Any, ...]]:
        """What passes of the model give for the batches of all ranks, in their order. Each rank runs its own.

        `run`: a pass over a batch; its tuple travels between the ranks, so it holds plain values. `what`: the wait for
        other ranks in messages.
        """
        backbone = self.model.backbone
        with backbone.at_work():
            results = [backbone.run_pass(partial(run, batch)) for batch in batches]
        return [result for part in current().gather(results, what=what) for result in part]

    def losses_of(
        self, batches: Sequence[tuple[list[int], Batch]], loss: Callable[[Batch], tuple[Tensor, Result]]
    ) -> tuple[float, list[int], list[Result]]:
        """The sum of the losses of numbered batches of all ranks, the numbers of their rows, and their measurements.

        `loss`: the loss of a batch, and what was measured in it, as plain values.
        """

        def measured(numbered: tuple[list[int], Batch]) -> tuple[list[int], float, Result]:
            indices, batch = numbered
            value, part = loss(batch)
            return indices, value.item(), part

        total, order, parts = 0.0, [], []
        for indices, value, part in self.results_of(batches, measured):
            total += value
            order += indices
            parts.append(part)
        return total, order, parts

    def _compare_ranks(self, step: int, result: UpdateResult) -> None:
        """Raises RankError if a rank has other numbers. Shards differ by their nature; replicas must not."""
        world = current()
        if world.size > 1:
            digest = {"loss": repr(result.loss), "gradient norm": repr(result.gradient_norm)}
            world.agree(digest | self.learners[self.role].digest(), what=f"the numbers and weights of step {step}")

    def _diverged(self, step: int, result: UpdateResult) -> str | None:
        """Why the run ends after this step; None to go on."""
        self.num_skipped_in_a_row = 0 if result.refusal is None else self.num_skipped_in_a_row + 1
        if self.num_skipped_in_a_row < MAX_CONSECUTIVE_SKIPS:
            return None
        return (
            f"step {step}: {self.num_skipped_in_a_row} updates in a row were skipped, so nothing is learned any more; "
            f"the last reason: {result.refusal}. The learning rate ({result.learning_rate:g}) may be too high: start "
            "another run with a lower one, or replace this one (--overwrite); --resume keeps it"
        )

    def writers(self) -> Mapping[str, Writer | RankWriter]:
        """Writers of the model and its optimizer, by folder of the checkpoint."""
        return writers_for({self.role: self.model}, self.learners, self.tokenizer)

    def state(self) -> Mapping[str, Any]:
        """Update counts. Data order needs no state: it is a function of the step."""
        return {"updates": update_counts(self.learners), "num_skipped_in_a_row": self.num_skipped_in_a_row}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load weights, optimizer and update counts."""
        restore_models(checkpoint, {self.role: self.model}, self.learners)
        self.num_skipped_in_a_row = checkpoint.state["task"].get("num_skipped_in_a_row", 0)

    def close(self) -> None:
        """Does nothing: a supervised task starts no processes."""


def mean_loss(result: UpdateResult, count: int) -> Mean:
    """The loss of an update as a mean over `count` rows or tokens; empty if the update was skipped."""
    return Mean(0, 0) if result.refusal is not None else Mean(result.loss * count, count)
