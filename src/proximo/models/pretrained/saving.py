"""Saves weights to a Hugging Face folder and loads them back. Not atomic: the checkpoint store takes care of that."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import PeftModel, load_peft_weights, set_peft_model_state_dict
from transformers import PreTrainedModel

from proximo.errors import CheckpointError
from proximo.models.pretrained.transformers_logging import quiet_transformers

CARD_WRITER = "create_or_update_model_card"
"""A method of peft's models."""


def save_pretrained(model: PreTrainedModel | PeftModel, folder: Path) -> None:
    """Save for `from_pretrained`: the whole model, or only the adapter (with a scalar head, if there is one)."""
    with quiet_transformers():
        if isinstance(model, PeftModel):
            with _without_card(model):
                # "auto" would ask the Hub whether the base's vocabulary has changed.
                model.save_pretrained(str(folder), save_embedding_layers=False)
            _settle_adapter_config(folder / "adapter_config.json")
        else:
            model.save_pretrained(folder)


@contextmanager
def _without_card(model: PeftModel) -> Generator[None]:
    """peft writes a card that says nothing but where on this machine the base lies, also into one that is there."""
    setattr(model, CARD_WRITER, lambda *_: None)
    try:
        yield
    finally:
        delattr(model, CARD_WRITER)


@torch.no_grad()
def load_weights(model: PreTrainedModel | PeftModel, folder: Path) -> None:
    """Copy weights that `save_pretrained` wrote back into `model`, bit for bit and in place.

    Raises CheckpointError where they are another model's; then nothing has been changed.
    """
    if isinstance(model, PeftModel):
        _load_adapter_weights(model, folder)
        return
    with quiet_transformers():
        # Through transformers, because some architectures are stored under other names and shapes than they run with.
        saved_model = type(model).from_pretrained(folder, dtype=model.dtype)
    saved, current = dict(saved_model.named_parameters()), dict(model.named_parameters())
    wrong = [name for name in saved.keys() | current.keys() if _shape(saved, name) != _shape(current, name)]
    if wrong:
        raise CheckpointError(
            f"the weights in {folder} are not those of the {type(model).__name__} in use: {len(wrong)} differ in name "
            f"or shape, such as {min(wrong)}"
        )
    for name, weight in current.items():
        weight.copy_(saved[name])


def _settle_adapter_config(config_file: Path) -> None:
    """Targets in order, and a local base by its absolute path.

    peft writes the targets as a set, in another order in every process: the files of equal runs would differ. And it
    writes the base as it was given, which is found from one working directory only.
    """
    config = json.loads(config_file.read_text(encoding="utf-8"))
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    base = config["base_model_name_or_path"]
    if base and Path(base).is_dir():
        config["base_model_name_or_path"] = str(Path(base).absolute())
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def _load_adapter_weights(model: PeftModel, folder: Path) -> None:
    saved = load_peft_weights(str(folder), device="cpu")
    wanted = model.state_dict()
    result = set_peft_model_state_dict(model, saved)
    missing = [name for name in result.missing_keys if name in wanted and "lora_" in name]
    wrong = [*result.unexpected_keys, *missing]
    if wrong:
        raise CheckpointError(f"{folder} holds the weights of another adapter than the one in use, such as {wrong[0]}")


def _shape(tensors: dict[str, torch.nn.Parameter], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None
