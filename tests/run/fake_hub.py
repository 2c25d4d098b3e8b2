"""Stands for the client of the Hugging Face Hub in tests of pushes: it keeps what is uploaded."""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

from huggingface_hub import HfApi, RepoUrl
from huggingface_hub.errors import HTTPError

from proximo.run.pushes import git_hash

URL = "https://huggingface.co"


def as_the_client(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that refuses the arguments that the method of this name of the real client would not take."""

    @wraps(method)
    def called(*given: Any, **named: Any) -> Any:
        inspect.signature(getattr(HfApi, method.__name__)).bind(*given, **named)
        return method(*given, **named)

    return called


class FakeHub:
    """What was pushed to it; `refuses`: the number of uploads that end with an error."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.commits: list[tuple[str, set[str]]] = []
        """The message and the files of each."""
        self.refuses = 0
        self.answers = Event()
        """Uploads are kept waiting while it is not set."""
        self.answers.set()

    @as_the_client
    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> RepoUrl:
        assert exist_ok
        if name not in self.repositories:
            self.repositories[name], self.private[name] = {}, private
        return RepoUrl(f"{URL}/{name}")

    @as_the_client
    def get_paths_info(self, name: str, paths: Sequence[str]) -> list[Any]:
        files = self.repositories[name]
        return [SimpleNamespace(blob_id=git_hash(files[path])) for path in paths if path in files]

    @as_the_client
    def upload_folder(
        self, *, repo_id: str, folder_path: Path, ignore_patterns: Sequence[str], commit_message: str
    ) -> None:
        self.answers.wait(1000)
        if self.refuses:
            self.refuses -= 1
            raise HTTPError("Forbidden: the storage is full")
        files = {path.name: path.read_bytes() for path in folder_path.iterdir() if path.name not in ignore_patterns}
        self.repositories[repo_id] |= files
        self.commits.append((commit_message, set(files)))
