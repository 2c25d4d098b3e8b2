"""What the worker of any role is: a model where it lives, who trains it, the handlers of its calls, its state."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from proximo.checkpoint.store import Checkpoint, Writer
from proximo.dataflow.executor import Handler
from proximo.learner.update import Learner
from proximo.models.language import LanguageModel
from proximo.models.precision.placement import Precision
from proximo.models.scalar import ScalarModel
from proximo.run.checkpointing import restore_models, writers_for

Model = TypeVar("Model", bound=LanguageModel | ScalarModel)


class RoleWorker(ABC, Generic[Model]):
    """One role of a run on one device. Each batch of a call goes to that device, and records come back."""

    role: ClassVar[str]

    def __init__(self, model: Model, learner: Learner | None = None) -> None:
        """`learner`: None for a role that does not train by itself."""
        self.model = model
        self.learner = learner

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    @property
    def precision(self) -> Precision:
        """In which numbers it computes."""
        return self.model.precision

    @property
    @abstractmethod
    def handlers(self) -> Mapping[str, Handler]:
        """See `dataflow/executor.py::Worker`."""

    @property
    def saved_models(self) -> dict[str, LanguageModel | ScalarModel]:
        """What of this role a checkpoint holds, by the folder's name."""
        return {} if self.learner is None else {self.role: self.model}

    @property
    def learners(self) -> dict[str, Learner]:
        """Its learner, if it has one, under the role's name."""
        return {} if self.learner is None else {self.role: self.learner}

    def writers(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Writer]:
        """What writes this role's models and optimizer into a checkpoint, by name."""
        return writers_for(self.saved_models, self.learners, tokenizer)

    def state(self) -> dict[str, Any]:
        """What else a checkpoint must keep of this role; JSON."""
        return {}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Put back what `writers` and `state` gave, bit for bit."""
        restore_models(checkpoint, self.saved_models, self.learners)
