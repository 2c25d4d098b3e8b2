"""Arguments that several commands share, and their checks. Importing it loads nothing heavy."""

import io
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated

import typer

from proximo.errors import UserError
from proximo.hub import is_local, not_there

RecipeName = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe."),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides of recipe values: run.seed=1")
]
Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run folder; for a pipeline, its last stage is used.",
    ),
]
RunOrModel = Annotated[
    str,
    typer.Argument(
        metavar="RUN_OR_MODEL",
        help="A run folder, a model folder or a Hub name.",
    ),
]
CheckpointName = Annotated[
    str,
    typer.Option(
        "--checkpoint",
        metavar="latest|best|step-N",
        help="The checkpoint to use.",
    ),
]
EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="local|vllm|ADDRESS",
        help="The engine: the built-in one, a vLLM server that the command starts, or a running server.",
    ),
]


@contextmanager
def loading(what: str = "torch and transformers", *, quiet: bool = False) -> Generator[None]:
    """Print on stderr what is imported inside: on a busy machine it takes a minute without any other output."""
    if not quiet:
        print(f"loading {what}", file=sys.stderr, flush=True)
    yield


def lines_of_stdin() -> Iterator[str]:
    """Lines of standard input, decoded as UTF-8 in every locale, like data files. Raises UserError for other bytes."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise UserError(
            f"standard input is not UTF-8 text: byte {error.object[error.start]:#04x} cannot be read"
        ) from error


def check_model_path(name: str) -> None:
    """Raises UserError if `name` is a local path without a model or run. Imports no torch, which takes seconds."""
    folder = Path(name).expanduser()
    if folder.is_file():
        raise UserError(f"{name} is a file; give a run, a model folder, or a Hub name such as owner/name")
    if is_local(name) and not folder.is_dir():
        raise UserError(f"{not_there(name)}; give a run, a model folder, or a Hub name such as owner/name")
    if folder.is_dir() and not any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
        from proximo.run.checkpoint_lookup import refuse_neither  # its schemas would slow down --help

        refuse_neither(folder)


def check_new_file(path: Path | None) -> None:
    """Raises UserError if no new file can be created at `path`. Call it before a model is loaded."""
    if path is None:
        return
    try:
        if path.exists():
            raise UserError(f"{path} exists and is left as it is: give a file that does not exist yet")
        if not path.parent.is_dir():
            raise UserError(f"there is no folder {path.parent} to write {path.name} to")
        # Try to create it, because permissions do not show whether the file system is read-only.
        with NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}."):
            pass
    except OSError as error:
        raise UserError(f"the file {path} cannot be written ({error.strerror}): give one elsewhere") from error
