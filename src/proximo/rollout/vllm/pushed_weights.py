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

if TYPE_CHECKING:  # transformers takes seconds to import
    from peft import PeftConfig

PREFIX = "proximo-weights-"
PART_BYTES = 256 * 2**20
_INCOMING = "incoming"
"""The folder of a push until it has its name."""
_ADAPTER_MARK = ".lora_"


class PushedWeights:
    """A folder with the weights of the last push. `close` removes it."""

    def __init__(self, parent: Path, *, adapter: "PeftConfig | None", num_tensors: int) -> None:
        """`parent`: a folder that the servers can read; one in memory is fastest. `adapter`: that of the
        policy, if only an adapter is trained. `num_tensors`: that the policy has, trained or not.
        """
        _remove_abandoned(parent)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_own_prefix()}{os.getpid()}-", dir=parent))
        self._adapter = adapter
        self._num_tensors = num_tensors

    @property
    def is_adapter(self) -> bool:
        """Whether a push is an adapter rather than weights of the model itself."""
        return self._adapter is not None

    def write(
        self, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None, *, kept: Collection[str] = ()
    ) -> Path:
        """Write a push. It replaces earlier ones except those that are `kept`. Returns its folder.

        `dtype`: the type of its tensors; None for their own. Each is asked for when those before it are written.

        Raises TrainingError if they cannot be written.
        """
        for earlier in self.folder.iterdir():
            if earlier.name not in kept:
                shutil.rmtree(earlier)
        folder = self.folder / _INCOMING
        try:
            return self._write(folder, tensors, dtype)
        except (OSError, SafetensorError) as error:
            size = sum(file.stat().st_size for file in folder.glob("*")) / 2**20
            raise TrainingError(
                f"the policy's weights cannot be written to {self.folder}, after {size:.0f} MiB of them: {error}. "
                "engine.transfer_folder names another folder that trainer and servers see"
            ) from None

    def keep(self, written: Path, name: str) -> Path:
        """Rename the written push into place. Returns its folder: the earlier one, if that was kept."""
        folder = written.with_name(name)
        if folder.exists():
            shutil.rmtree(written)
            return folder
        return written.rename(folder)

    def _write(self, folder: Path, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> Path:
        folder.mkdir()
        if self._adapter is None:
            metadata = {"tensors_of_model": str(self._num_tensors)}
            for number, part in enumerate(_parts(tensors, dtype)):
                save_file(part, folder / f"model-{number:05}.safetensors", metadata=metadata)
        else:
            adapter = {_in_file(name): _on_host(tensor, dtype) for name, tensor in tensors}
            save_file(adapter, folder / "adapter_model.safetensors")
            self._adapter.save_pretrained(str(folder))
        return folder

    def close(self) -> None:
        """Remove the folder that the weights go through."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _parts(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[dict[str, Tensor]]:
    """The tensors on the host, in parts of about PART_BYTES, each until the next one: no more are copied at a time."""
    part: dict[str, Tensor] = {}
    for name, tensor in tensors:
        part[name] = _on_host(tensor, dtype)
        if sum(each.nbytes for each in part.values()) >= PART_BYTES:
            yield part
            part.clear()
    if part:
        yield part


def _on_host(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A contiguous tensor on the host; the given one where it is such a tensor."""
    return tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype).contiguous()


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
