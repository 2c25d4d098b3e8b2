"""Writes models and optimizers into a checkpoint, restores and finds them; `checkpoint/` makes the writing atomic."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from proximo.checkpoint.ranks import Captured, RankWriter, Writer, replace_shards
from proximo.checkpoint.reading import Checkpoint
from proximo.checkpoint.store import CheckpointStore
from proximo.checkpoint.tensors import capture_optimizer, read_optimizer, write_optimizer
from proximo.config.stages import MARK
from proximo.distributed.shard_files import CapturedShards, is_sharded, is_shards
from proximo.errors import ConfigError
from proximo.learner.optimizers import page_state
from proximo.learner.update import Learner
from proximo.models.language import LanguageModel
from proximo.models.pretrained.saving import load_weights, save_pretrained, whole_adapter
from proximo.models.pretrained.sharded_folders import SHARDS, assemble, holds_shards, save_configs, saved_tensors
from proximo.models.scalar import ScalarModel
from proximo.models.sharing import load_head, save_head, whole_head, write_head
from proximo.models.transformers_model import is_adapted
from proximo.rollout.stopping import name_endings

if TYPE_CHECKING:  # transformers takes seconds to import
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def writers_for(
    models: Mapping[str, LanguageModel | ScalarModel],
    learners: Mapping[str, Learner],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    head: ScalarModel | None = None,
) -> dict[str, Writer | RankWriter]:
    """One folder per role in Hugging Face layout with tokenizer and template, one file per optimizer.

    If a model is sharded, each rank writes its part of weights and optimizer; adapters and heads are gathered.

    `head`: a value model on the policy's trunk; its folder `value` gets the head and the tokenizer only.
    """

    for model in models.values():
        if isinstance(model, LanguageModel):
            name_endings(model.base, tokenizer)
    writers = {role: _model_writer(model, tokenizer) for role, model in models.items()}
    if head is not None:
        writers["value"] = _head_writer(head, tokenizer)
    for role, learner in learners.items():
        if any(map(is_sharded, learner.parameters.values())):
            writers[_shards_of(role)] = _sharded_optimizer_writer(learner)
        else:
            writers[_file_of(role)] = partial(
                write_optimizer, optimizer=learner.optimizer, named_parameters=learner.parameters
            )
    return writers


def _model_writer(model: LanguageModel | ScalarModel, tokenizer: "PreTrainedTokenizerBase") -> Writer | RankWriter:
    inner = model.model
    if not any(map(is_sharded, inner.parameters())):
        return _with_tokenizer(lambda path: save_pretrained(inner, path), tokenizer)
    if is_adapted(inner):
        return RankWriter(capture=lambda: _gathered_adapter(inner, tokenizer))
    return RankWriter(capture=lambda: _captured_model(inner, tokenizer))


def _head_writer(model: ScalarModel, tokenizer: "PreTrainedTokenizerBase") -> Writer | RankWriter:
    if not any(map(is_sharded, model.trained_head())):
        return _with_tokenizer(lambda path: save_head(model, path), tokenizer)

    def capture() -> Captured:
        head = whole_head(model)
        return Captured(first=_with_tokenizer(lambda path: write_head(head, path), tokenizer))

    return RankWriter(capture=capture)


def _gathered_adapter(model: "PeftModel", tokenizer: "PreTrainedTokenizerBase") -> Captured:
    """An adapter, gathered because it is small, and written as on one rank."""
    adapter = whole_adapter(model)
    return Captured(first=_with_tokenizer(lambda path: save_pretrained(model, path, adapter=adapter), tokenizer))


def _captured_model(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> Captured:
    shards = CapturedShards(saved_tensors(model))

    def begin(path: Path) -> None:
        save_configs(model, path)
        shards.write_index(path / SHARDS)

    return Captured(first=_with_tokenizer(begin, tokenizer), each=lambda path: shards.write(path / SHARDS))


def _with_tokenizer(write: Writer, tokenizer: "PreTrainedTokenizerBase") -> Writer:
    def write_both(path: Path) -> None:
        write(path)
        tokenizer.save_pretrained(path)

    return write_both


def _sharded_optimizer_writer(learner: Learner) -> RankWriter:
    def capture() -> Captured:
        shards = capture_optimizer(learner.optimizer, learner.parameters)
        return Captured(first=shards.write_index, each=shards.write)

    return RankWriter(capture=capture)


def _file_of(role: str) -> str:
    return f"optimizer/{role}.safetensors"


def _shards_of(role: str) -> str:
    return f"optimizer/{role}"


def restore_models(
    checkpoint: Checkpoint,
    models: Mapping[str, LanguageModel | ScalarModel],
    learners: Mapping[str, Learner],
    *,
    head: ScalarModel | None = None,
) -> None:
    """Restore weights, optimizer states and the learners' update counts, bit for bit.

    The checkpoint may come from another number of ranks.
    """
    if head is not None:
        load_head(head, checkpoint.path("value"))
    for role, model in models.items():
        load_weights(model.model, checkpoint.path(role))
    for role, learner in learners.items():
        shards = checkpoint.folder / _shards_of(role)
        saved = shards if is_shards(shards) else checkpoint.path(_file_of(role))
        read_optimizer(saved, learner.optimizer, learner.parameters)
        page_state(learner.optimizer)
        learner.updates_done = checkpoint.state["task"]["updates"][role]


def update_counts(learners: Mapping[str, Learner]) -> dict[str, int]:
    """Role -> optimizer steps taken: the position in each schedule."""
    return {role: learner.updates_done for role, learner in learners.items()}


def consolidate(store: CheckpointStore) -> None:
    """Make the models of the latest and of the best checkpoint whole, so that `from_pretrained` loads their folders.

    Optimizers stay as the ranks wrote them. Call it in one process while no save is running. It needs host memory for
    one model.
    """
    if not any(store.folder.glob(f"step-*/*/{SHARDS}")):
        return
    found = {each.step: each for each in (store.latest(), store.best()) if each is not None}
    for checkpoint in found.values():
        for folder in sorted(checkpoint.folder.iterdir()):
            if holds_shards(folder):
                _make_whole(checkpoint.folder, folder)


def _make_whole(checkpoint: Path, folder: Path) -> None:
    model = assemble(folder)
    replace_shards(checkpoint, folder.name, SHARDS, lambda path: save_pretrained(model, path))


def stage_result(folder: Path, reference: str) -> Path:
    """The model folder of a stage: from its best checkpoint if one was measured, otherwise from its latest.

    Raises ConfigError where that stage has no checkpoint.
    """
    stage = reference.removeprefix(MARK)
    store = CheckpointStore(folder / stage / "checkpoints")
    checkpoint = store.best() or store.latest()
    if checkpoint is None:
        raise ConfigError(
            f"{reference} names the result of stage {stage}, but {folder / stage} has no checkpoint: run the pipeline "
            f"with a section {stage} first, or name a model by its path"
        )
    return checkpoint.path(checkpoint.roles[0])
