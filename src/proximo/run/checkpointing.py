"""Writes models and optimizers into a checkpoint, and restores them. The atomic writing itself is in checkpoint/."""

from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from proximo.checkpoint.store import Checkpoint, Writer
from proximo.checkpoint.tensors import read_optimizer, write_optimizer
from proximo.learner.low_memory import page_state
from proximo.learner.update import Learner
from proximo.models.language import LanguageModel
from proximo.models.pretrained.saving import load_weights, save_pretrained
from proximo.models.scalar import ScalarModel
from proximo.models.sharing.trunk import load_head, save_head


def writers_for(
    models: Mapping[str, LanguageModel | ScalarModel],
    learners: Mapping[str, Learner],
    tokenizer: PreTrainedTokenizerBase,
    *,
    head: ScalarModel | None = None,
) -> dict[str, Writer]:
    """One folder per role in Hugging Face layout with tokenizer and template, one file per optimizer.

    `head`: a value model on the policy's trunk; its folder `value` gets the head and the tokenizer only.
    """

    def head_writer(model: ScalarModel) -> Writer:
        def write(path: Path) -> None:
            save_head(model, path)
            tokenizer.save_pretrained(path)

        return write

    def model_writer(model: LanguageModel | ScalarModel) -> Writer:
        def write(path: Path) -> None:
            save_pretrained(model.model, path)
            tokenizer.save_pretrained(path)

        return write

    def optimizer_writer(learner: Learner) -> Writer:
        return lambda path: write_optimizer(path, learner.optimizer, learner.parameters)

    writers = {role: model_writer(model) for role, model in models.items()}
    if head is not None:
        writers["value"] = head_writer(head)
    return writers | {f"optimizer/{role}.safetensors": optimizer_writer(learner) for role, learner in learners.items()}


def restore_models(
    checkpoint: Checkpoint,
    models: Mapping[str, LanguageModel | ScalarModel],
    learners: Mapping[str, Learner],
    *,
    head: ScalarModel | None = None,
) -> None:
    """Restore weights, optimizer states and the learners' update counts, bit for bit."""
    if head is not None:
        load_head(head, checkpoint.path("value"))
    for role, model in models.items():
        load_weights(model.model, checkpoint.path(role))
    for role, learner in learners.items():
        read_optimizer(checkpoint.path(f"optimizer/{role}.safetensors"), learner.optimizer, learner.parameters)
        page_state(learner.optimizer)
        learner.updates_done = checkpoint.state["task"]["updates"][role]


def update_counts(learners: Mapping[str, Learner]) -> dict[str, int]:
    """Role -> optimizer steps taken: the position in each schedule."""
    return {role: learner.updates_done for role, learner in learners.items()}
