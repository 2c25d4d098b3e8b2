"""Uploads an exported model to the Hugging Face Hub."""

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HTTPError

from proximo.errors import ProximoError, UserError
from proximo.models.pretrained.sources import read_adapter_config
from proximo.run.model_card import CARD


def check_pushable(model: Path, *, merge: bool) -> None:
    """Raises UserError for an adapter whose base is a local folder: it would load nowhere else."""
    if merge or not (model / "adapter_config.json").is_file():
        return
    base = read_adapter_config(model).get("base_model_name_or_path") or ""
    if Path(base).is_absolute():
        raise UserError(
            f"{model} is an adapter, and its base is the folder {base} of this machine, so that it would load nowhere "
            "else: add --merge"
        )


def push_folder(folder: Path, name: str, *, private: bool) -> str:
    """Upload the folder as the model `name`, created if missing; returns its URL.

    An existing model card on the Hub is kept. Raises ProximoError if the Hub cannot be reached or refuses.
    """
    api = huggingface_hub.HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        kept = [CARD] if api.file_exists(address.repo_id, CARD) else []
        api.upload_folder(repo_id=address.repo_id, folder_path=folder, ignore_patterns=kept)
    except (OSError, HTTPError, ValueError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ProximoError(
            f"{folder} is written, but could not be pushed to {name}: {reason}. Is there a network, and are you logged "
            f"in (`hf auth login`) as somebody who may write there? Then `hf upload {name} {folder}` does the rest"
        ) from error
    return str(address)
