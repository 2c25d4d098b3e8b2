"""Uploads a model folder to the Hugging Face Hub, also as a program that a run starts in the background.

`python -m proximo.run.hub.upload REQUEST` reads a JSON file with the arguments of `push_folder` and the process id of
the run as `parent`, and writes the result to standard output as JSON. Imports no torch.
"""

import hashlib
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HTTPError

from proximo.errors import ProximoError, redacted

CARD = "README.md"
LOOK_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed:
    """The result of an upload."""

    url: str
    card: str | None
    """Git's hash of the model card that was uploaded; None if the Hub's own was kept."""


def push_folder(folder: Path, name: str, *, private: bool, message: str, own_card: str | None = None) -> Pushed:
    """Upload the folder as the model `name`, created if missing, in one commit.

    A model card on the Hub is kept, unless its hash is `own_card`: then an earlier upload wrote it. Raises ProximoError
    if the Hub cannot be reached or refuses.
    """
    api = huggingface_hub.HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        there = [each.blob_id for each in api.get_paths_info(address.repo_id, [CARD]) if hasattr(each, "blob_id")]
        keeps = bool(there) and there != [own_card]
        without = [CARD] if keeps else []
        api.upload_folder(repo_id=address.repo_id, folder_path=folder, ignore_patterns=without, commit_message=message)
    except (OSError, HTTPError, ValueError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ProximoError(
            f"it could not be pushed to {name}: {reason}. Is there a network, and are you logged in (`hf auth login`) "
            "with write access?"
        ) from error
    card = folder / CARD
    return Pushed(url=str(address), card=None if keeps or not card.is_file() else git_hash(card.read_bytes()))


def git_hash(data: bytes) -> str:
    """The hash that git, and so the Hub, computes for the content of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _end_with(parent: int) -> None:
    """End this process once its parent has ended, because a late commit could overwrite one of the resumed run."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent").start()


def main(request: Path) -> int:
    """Upload the requested folder; exit status 1 if that failed, with the reason on standard error."""
    asked = json.loads(request.read_bytes())
    _end_with(asked.pop("parent"))
    try:
        pushed = push_folder(Path(asked.pop("folder")), asked.pop("name"), **asked)
    except ProximoError as error:
        print(redacted(str(error)), file=sys.stderr)
        return 1
    print(json.dumps(asdict(pushed)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
