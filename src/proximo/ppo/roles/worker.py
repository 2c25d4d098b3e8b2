"""The base class of workers: a role's model on its device, its learner and its state."""

from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

from proximo.checkpoint.ranks import RankWriter, Writer
from proximo.checkpoint.reading import Checkpoint
from proximo.learner.update import Learner
from proximo.models.language import LanguageModel
from proximo.models.precision.placement import Precision
from proximo.models.scalar import ScalarModel
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
