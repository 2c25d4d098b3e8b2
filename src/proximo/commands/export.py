"""Exports a trained model of a run as a Hugging Face folder. The run stays as it is."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from proximo.checkpoint import atomic
from proximo.checkpoint.run_folder import check_new_folder
from proximo.errors import CheckpointError, ProximoError, UserError, disk_refused
from proximo.models.loading import load_language_model, load_scalar_model
from proximo.models.lora import load_adapter, merge
from proximo.models.pretrained.folders import ADAPTER_CONFIG, is_adapter_folder, read_adapter_config
from proximo.models.pretrained.sharded_folders import assemble, holds_shards
from proximo.models.pretrained.sources import ModelSource, adapter_base
from proximo.models.pretrained.vocabulary import load_tokenizer, resize_vocabulary, vocabulary_size
from proximo.models.scalar import HeadStart
from proximo.models.sharing import HEAD_FILE
from proximo.models.transformers_model import is_adapted, quiet_transformers
from proximo.rollout.stopping import name_endings
from proximo.run.checkpoint_lookup import find_model, find_run
from proximo.run.model_card import SCALAR_ROLES, write_card
from proximo.run.preflight import check_push_name
from proximo.run.pushes import push_folder

Role = Literal["policy", "value", "reward", "average", "reference"]
DType = Literal["float32", "bfloat16"]
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def run_export(
    run: Path,
    out: Path,
    *,
    role: Role | None = None,
    checkpoint: str = "latest",
    merge: bool = False,
    dtype: DType | None = None,
    push: str | None = None,
    private: bool = False,
) -> int:
    """Write the folder `out` atomically, with tokenizer, chat template, generation config and model card.

    `role`: None for the model that the run trained. `merge`: an adapter into its base; else the folder holds the
    adapter alone. `dtype`: None keeps the saved one. `push`: also upload the folder to the Hub under this name,
    `private` if it is created.

    Raises UserError for an unknown role or dtype, RunFolderError if `out` cannot be a new folder or the run has no such
    model, ModelError if a base cannot be loaded, and ProximoError if the folder was written but the upload failed.
    """
    check_push_name(push, private=private)
    for name, given, known in (("role", role, get_args(Role)), ("dtype", dtype, get_args(DType))):
        if given not in (None, *known):
            raise UserError(f"{name} of an export is one of {', '.join(known)}, got {given!r}")
    check_new_folder(out)
    found = find_model(run, checkpoint, role)
    source = found.folder
    if push is not None:
        _check_pushable(source, merge=merge)

    def add_card(folder: Path) -> None:
        write_card(folder, find_run(run), role=source.name, step=found.step)

    weights = None if dtype is None else getattr(torch, dtype)
    export_model(source, out, merge=merge, dtype=weights, finish=add_card)
    print(f"{out}: {source.name} of {source.parent}")
    if push is not None:
        message = f"Step {found.step} of {find_run(run).name}"
        try:
            print(push_folder(out, push, private=private, message=message).url)
        except ProximoError as error:
            upload = f"hf upload {push} {out}"
            raise ProximoError(f"{out} is written, but {error} Then `{upload}` does the rest") from error
    return 0


def export_model(
    source: Path,
    out: Path,
    *,
    merge: bool,
    dtype: torch.dtype | None = None,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Write one role's folder of a checkpoint to `out` atomically; `finish` adds files before the rename."""
    temporary = atomic.temporary_beside(out)
    if temporary.exists():
        atomic.remove(temporary)
    atomic.make_folder(temporary)
    try:
        _writer(source, merge=merge)(source, temporary, dtype)
        load_tokenizer(str(source)).save_pretrained(temporary)
        if finish is not None:
            finish(temporary)
        atomic.fsync_tree(temporary)
        atomic.publish_folder(temporary, out)
    except Exception as error:
        atomic.remove(temporary)
        if not disk_refused(error):
            raise
        raise CheckpointError(f"the model could not be written to {out}: {error}; nothing is left there") from error


def _check_pushable(model: Path, *, merge: bool) -> None:
    """Raises UserError for an adapter whose base is a local folder: it would load nowhere else."""
    if merge or not is_adapter_folder(model):
        return
    base = read_adapter_config(model).get("base_model_name_or_path") or ""
    if Path(base).is_absolute():
        raise UserError(
            f"{model} is an adapter, and its base is the folder {base} of this machine, so that it would load nowhere "
            "else: add --merge"
        )


def _writer(source: Path, *, merge: bool) -> Callable[[Path, Path, torch.dtype | None], None]:
    if (source / HEAD_FILE).is_file():
        return _write_from_trunk
    if not is_adapter_folder(source):
        return _write_whole
    return _write_merged if merge else _write_adapter


def _write_whole(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    if holds_shards(source):
        model = assemble(source, dtype=dtype)
    else:
        loader: Any = AutoModelForSequenceClassification if source.name in SCALAR_ROLES else AutoModelForCausalLM
        with quiet_transformers():
            model = loader.from_pretrained(source, dtype=dtype or "auto")
    _save_whole(model, source, target)


def _write_from_trunk(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Write the value head with a copy of the policy's trunk as a classifier; an adapter is merged."""
    model = load_scalar_model(ModelSource(path=str(source)), fresh_head=None, device=torch.device("cpu"))
    resize_vocabulary(model.base, vocabulary_size(load_tokenizer(str(source))))
    with quiet_transformers():
        (model.base if dtype is None else model.base.to(dtype)).save_pretrained(target)


def _write_adapter(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    shutil.copyfile(source / ADAPTER_CONFIG, target / ADAPTER_CONFIG)
    weights = {name: w if dtype is None else w.to(dtype) for name, w in load_file(source / ADAPTER_WEIGHTS).items()}
    save_file(weights, target / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def _write_merged(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    merged = _merged_scalar(source) if source.name in SCALAR_ROLES else _merged_policy(source)
    resize_vocabulary(merged, vocabulary_size(load_tokenizer(str(source))))
    _save_whole(merged if dtype is None else merged.to(dtype), source, target)


def _save_whole(model: PreTrainedModel, source: Path, target: Path) -> None:
    if source.name not in SCALAR_ROLES:
        name_endings(model, load_tokenizer(str(source)))
    with quiet_transformers():
        model.save_pretrained(target)


def _merged_policy(source: Path) -> PreTrainedModel:
    model = load_language_model(ModelSource(path=str(source)), device=torch.device("cpu")).model
    return merge(model) if is_adapted(model) else model


def _merged_scalar(source: Path) -> PreTrainedModel:
    base = adapter_base(ModelSource(path=str(source)))
    if base is None:
        raise CheckpointError(f"{source} no longer holds an adapter: it was changed while it was read")
    # The head of the base does not matter: the adapter contains the trained one.
    model = load_scalar_model(base, fresh_head=HeadStart.ZERO, device=torch.device("cpu"))
    return merge(load_adapter(model.base, source))
