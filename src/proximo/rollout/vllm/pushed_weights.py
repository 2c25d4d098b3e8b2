"""The weights that vLLM servers load, as files that they can read."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import PeftConfig
from safetensors.torch import save_file
from torch import Tensor

PREFIX = "proximo-weights-"
_ADAPTER_MARK = ".lora_"


class PushedWeights:
    """A folder with the weights of the last push. `close` removes it."""

    def __init__(self, parent: Path, *, adapter: PeftConfig | None) -> None:
        """`parent`: a folder that the servers can read; one in memory is fastest. `adapter`: that of the
        policy, if only an adapter is trained.
        """
        _remove_abandoned(parent)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
        self._adapter = adapter

    @property
    def is_adapter(self) -> bool:
        """Whether a push is an adapter rather than weights of the model itself."""
        return self._adapter is not None

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> Path:
        """Write the weights of a push and remove those of earlier ones. Returns their file, or the adapter's folder."""
        folder = self.folder / name
        folder.mkdir()
        if self._adapter is None:
            path = folder / "model.safetensors"
            save_file(dict(tensors), path)
        else:
            path = folder
            save_file({_in_file(key): tensor for key, tensor in tensors.items()}, folder / "adapter_model.safetensors")
            self._adapter.save_pretrained(str(folder))
        for earlier in self.folder.iterdir():
            if earlier != folder:
                shutil.rmtree(earlier)
        return path

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


@torch.no_grad()
def on_host(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Contiguous copies on the host, in `dtype` if one is given."""
    return {
        name: tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype, copy=True).contiguous()
        for name, tensor in tensors.items()
    }


def _in_file(name: str) -> str:
    """The name of an adapter's tensor in a file: without the name of the adapter."""
    stem, mark, rest = name.rpartition(_ADAPTER_MARK)
    part, _, kind = rest.split(".")  # A.default.weight
    return f"{stem}{mark}{part}.{kind}"


def _remove_abandoned(parent: Path) -> None:
    """Remove folders of this user's trainers that ended without removing theirs."""
    for path in parent.glob(f"{PREFIX}*"):
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
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
