"""Files of weights for vLLM servers."""

import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from proximo.errors import TrainingError
from proximo.rollout.vllm.changes import WrittenWeights

if TYPE_CHECKING:  # transformers takes seconds to import
    from peft import PeftConfig

PREFIX = "proximo-weights-"
PART_BYTES = 256 * 2**20
IN_MEMORY = Path("/dev/shm")
"""The folder of a file system in memory, on Linux."""
_INCOMING = "incoming-"
"""Begins the name of a push until it has its own."""
_ADAPTER_MARK = ".lora_"


class PushedWeights:
    """A folder with the weights of the last push. `close` removes it."""

    def __init__(self, parent: Path, *, adapter: "PeftConfig | None", num_tensors: int) -> None:
        """`parent`: a folder that the servers can read; one in memory is fastest. `adapter`: that of the
        policy, if only an adapter is trained. `num_tensors`: that the policy has, trained or not.
        """
        _remove_abandoned(parent)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_own_prefix()}{os.getpid()}-", dir=parent))
        self.num_tensors = num_tensors
        self.last: Path | None = None
        """The folder of the last push."""
        self._adapter = adapter
        self._compares = adapter is None and not _is_in_memory(parent)
        self._written: WrittenWeights | None = None

    @property
    def is_adapter(self) -> bool:
        """Whether a push is an adapter rather than weights of the model itself."""
        return self._adapter is not None

    @property
    def digests_of_changes(self) -> list[str]:
        """SHA-256 of each file with changes of the last push; empty if its tensors are written whole."""
        return [] if self._written is None else list(self._written.digests)

    def write(
        self, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None, *, kept: Collection[str] = ()
    ) -> Path:
        """Write a push. It replaces earlier ones except those that are `kept`. Returns its folder.

        Where the folder is not in memory, a push that changes little is written as changes. `dtype`: the type of its
        tensors; None for their own. Each is asked for when those before it are written.

        Raises TrainingError if they cannot be written.
        """
        on_host, changes = ((name, _on_host(tensor, dtype)) for name, tensor in tensors), None
        try:
            if self._written is None:
                self.clear(kept=kept)
            else:
                changes, on_host = self._written.changes(on_host)
            if changes is None or self._written is None or self.last is None:
                return self._replace(on_host, kept)
            self._written.add(changes, self.last)
            self.clear(kept=[*kept, self.last.name])
            return self.last
        except (OSError, SafetensorError) as error:
            size = sum(file.stat().st_size for file in self.folder.glob(f"{_INCOMING}*/*")) / 2**20
            raise TrainingError(
                f"the policy's weights cannot be written to {self.folder}, after {size:.0f} MiB of them: {error}. "
                "engine.transfer_folder names another folder that trainer and servers see"
            ) from None

    def write_whole(self) -> None:
        """Write the tensors of a push of changes whole. The folder of the changes stays until the next push."""
        if self._written is not None and self.last is not None:
            self._replace(self._written.tensors(), [self.last.name])

    def clear(self, *, kept: Collection[str] = ()) -> None:
        """Remove all pushes except those that are `kept`."""
        if self.last is not None and self.last.name not in kept:
            self.last = self._written = None
        for earlier in self.folder.iterdir():
            if earlier.name not in kept:
                shutil.rmtree(earlier)

    def keep(self, name: str) -> None:
        """Rename the last push, if it is written. An earlier one of this name that was kept takes its place."""
        if self.last is None or self.last.name == name:
            return
        folder = self.last.with_name(name)
        if folder.exists():
            shutil.rmtree(self.last)
        else:
            self.last.rename(folder)
        self.last = folder

    def _replace(self, on_host: Iterable[tuple[str, Tensor]], kept: Collection[str]) -> Path:
        """Write whole tensors, in place of pushes that are not kept. Those that are compared are read until then."""
        self.last = self._write(Path(tempfile.mkdtemp(prefix=_INCOMING, dir=self.folder)), on_host)
        self._written = None  # closes the files of before: a network file system keeps a folder with open ones
        self.clear(kept=[*kept, self.last.name])
        self._written = WrittenWeights(self.last) if self._compares else None
        return self.last

    def _write(self, folder: Path, on_host: Iterable[tuple[str, Tensor]]) -> Path:
        if self._adapter is None:
            metadata = {"tensors_of_model": str(self.num_tensors)}
            for number, part in enumerate(_parts(on_host)):
                save_file(part, folder / f"model-{number:05}.safetensors", metadata=metadata)
        else:
            save_file({_in_file(name): tensor for name, tensor in on_host}, folder / "adapter_model.safetensors")
            self._adapter.save_pretrained(str(folder))
        return folder

    def close(self) -> None:
        """Remove the folder that the weights go through."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _parts(on_host: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The tensors in parts of about PART_BYTES, each until the next one: no more are copied at a time."""
    part: dict[str, Tensor] = {}
    for name, tensor in on_host:
        part[name] = tensor
        del tensor  # it would keep the last one of a part while the next one is made
        if sum(each.nbytes for each in part.values()) >= PART_BYTES:
            yield part
            part.clear()
    if part:
        yield part


def _on_host(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A contiguous tensor on the host; the given one where it is such a tensor."""
    return tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype).contiguous()


def _is_in_memory(folder: Path) -> bool:
    return IN_MEMORY.is_dir() and folder.stat().st_dev == IN_MEMORY.stat().st_dev


def _in_file(name: str) -> str:
    """The name of an adapter's tensor in a file: without the name of the adapter."""
    stem, mark, rest = name.rpartition(_ADAPTER_MARK)
    part, _, kind = rest.split(".")  # A.default.weight
    return f"{stem}{mark}{part}.{kind}"


def _own_prefix() -> str:
    """Begins the names of this machine's folders: a process id says nothing on another machine or in a container."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    place = hashlib.sha256(f"{platform.node()} {namespace}".encode()).hexdigest()[:8]
    return f"{PREFIX}{place}-"


def _remove_abandoned(parent: Path) -> None:
    """Remove folders of this user's trainers on this machine that ended without removing theirs."""
    for path in parent.glob(f"{_own_prefix()}*"):
        owner = path.name.removeprefix(_own_prefix()).partition("-")[0]
        if owner.isdigit() and not _runs(int(owner)) and path.stat().st_uid == os.getuid():
            shutil.rmtree(path, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
