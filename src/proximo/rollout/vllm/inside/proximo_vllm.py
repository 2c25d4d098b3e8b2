"""Runs inside vLLM's worker processes, in vLLM's own environment: loads the weights that a trainer wrote to files, or
to the memory of its device, which may be another one of this machine.

vLLM imports this file by the name of `Worker` (`--worker-extension-cls`). It imports nothing of Proximo, which is not
in that environment. The transfer engine is vLLM's own interface: init, start, update, finish.
"""

import base64
import ctypes
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BOOT = Path("/proc/sys/kernel/random/boot_id")
Change = tuple[torch.Tensor, torch.Tensor]
"""Indices of a flat tensor, and the values there."""


@dataclass
class TransferInit(WeightTransferInitInfo):
    """The trainer's memory. Files need no preparation."""

    host: str | None = None
    """The machine of its device, as `host_of` names it; None for files."""
    handle: str = ""
    """What opens it, as the driver gave it: 64 bytes in base64."""
    size: int = 0
    """In bytes."""


@dataclass
class TransferUpdate(WeightTransferUpdateInfo):
    """The place and the contents of the weights."""

    digest: str
    path: str | None = None
    """Folder of the files; None for the memory."""
    changes: list[str] = field(default_factory=list)
    """SHA-256 of each file with changes of the whole tensors, in their order."""
    tensors: list[tuple[str, str, list[int], int]] = field(default_factory=list)
    """Name, type, shape and first byte of each tensor in the memory."""
    tensors_of_model: int | None = None
    """That the trainer's model has, sent or not. Files say it themselves."""


class Transfer(WeightTransferEngine[TransferInit, TransferUpdate]):
    """Loads tensors by their names in the checkpoint. Others keep their values."""

    init_info_cls = TransferInit
    update_info_cls = TransferUpdate
    _memory: torch.Tensor | None = None
    _close: Callable[[], None] | None = None

    def init_transfer_engine(self, init_info: TransferInit) -> None:
        """Open the trainer's memory, if it says where. Raises ValueError if it cannot be opened here."""
        if init_info.host is None:
            self.shutdown()
            return
        problem = None
        try:
            self.shutdown()
            if (own := host_of(self.device)) == init_info.host:
                handle = base64.b64decode(init_info.handle)
                self._memory, self._close = opened(handle, init_info.size, self.device)
            else:
                problem = f"the trainer's memory is that of a GPU on host {init_info.host}, the server is on {own}"
        except Exception as error:  # of any kind: the other workers wait for this one
            problem = f"the trainer's memory cannot be opened: {error}"
        if not all_agree(problem):
            self.shutdown()

    def start_weight_update(self) -> None:
        """Nothing to do. Layers are opened once the weights have proved good, and closed in the same call."""

    def receive_weights(self, update_info: TransferUpdate) -> None:
        """Load the weights, if they are those of the trainer."""
        try:
            self._receive(update_info)
        finally:
            self.shutdown()

    def _receive(self, update: TransferUpdate) -> None:
        problem, tensors, changes, num_of_model = None, {}, {}, update.tensors_of_model
        try:
            if update.path is None:
                tensors = self._in_memory(update.tensors)
            else:
                tensors, num_of_model = _in_files(Path(update.path))
                changes = _changes_in_files(Path(update.path), update.changes)
            if (found := digest(tensors, changes)) != update.digest:
                problem = f"{update.path or 'the memory'} holds other weights than were announced: {found}"
        except Exception as error:  # of any kind: the other workers wait for this one
            problem = str(error) if isinstance(error, ValueError) else f"the weights cannot be read: {error!r:.200}"
        if not all_agree(problem):
            return
        # On a CPU matrices are packed for its products: layers are opened, filled, and packed again. An open layer
        # cannot sample, so none stays open, also where the tensors do not fit the model.
        loaded = None
        initialize_layerwise_reload(self.model)
        try:
            loaded = self._fill(tensors, changes)
        except ValueError as error:
            problem = str(error)
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
            self._pack_heads()
        if len(tensors) == num_of_model and loaded is not None and (missing := self._plain_parameters() - loaded):
            problem = f"the trainer's model has no {min(missing)}, which the server's has"
        all_agree(problem)

    def _in_memory(self, layout: Sequence[tuple[str, str, list[int], int]]) -> dict[str, torch.Tensor]:
        """The tensors in the trainer's memory, which must be open."""
        if self._memory is None:
            raise ValueError("no memory of a trainer is open")
        found = {}
        for name, kind, shape, start in layout:
            dtype = getattr(torch, kind)
            found[name] = self._memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        return found

    def _fill(self, tensors: Mapping[str, torch.Tensor], changes: Mapping[str, Sequence[Change]]) -> set[str] | None:
        """Load all tensors. Returns the names of the parameters that they went into, where the model says so."""
        given = []

        def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors.items():
                given.append(name)
                yield name, self._changed(tensor, changes.get(name, ()))

        try:
            return self.model.load_weights(one_by_one())
        except Exception as error:  # of any kind: each model of vLLM checks names and shapes in its own way
            tensor = f"{given[-1]} of shape {tuple(tensors[given[-1]].shape)}" if given else "the files"
            raise ValueError(f"the server's model has no place for {tensor}: {error!r:.200}") from error

    def _changed(self, tensor: torch.Tensor, changes: Sequence[Change]) -> torch.Tensor:
        """The tensor itself, or a changed copy on the model's device."""
        copy = tensor.to(self.device, copy=True) if changes else tensor
        for places, values in changes:
            copy.view(-1)[places.to(self.device).long()] = values.to(self.device)
        return copy

    def _plain_parameters(self) -> set[str]:
        """Names of the parameters that vLLM keeps as checkpoints have them; each decoder layer has some."""
        return {
            f"{prefix}.{name}"
            for prefix, module in self.model.named_modules()
            if not hasattr(module, "quant_method")
            for name, _ in module.named_parameters(recurse=False)
        }

    def finish_weight_update(self) -> None:
        """Does nothing: `receive_weights` has closed the layers."""

    def _pack_heads(self) -> None:
        """Pack the heads that share the weights of an embedding, which vLLM leaves out."""
        modules = [module for module in self.model.modules() if isinstance(module, VocabParallelEmbedding)]
        heads = [module for module in modules if isinstance(module, ParallelLMHead)]
        embedded = {module.weight.data_ptr() for module in modules if module not in heads}
        for head in heads:
            if head.weight.data_ptr() in embedded:
                head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        """Close the trainer's memory, once nothing on the device reads it."""
        close, self._memory, self._close = self._close, None, None
        if close is not None:
            close()


def _in_files(folder: Path) -> tuple[dict[str, torch.Tensor], int | None]:
    """The whole tensors of a push, and how many the trainer's model has."""
    tensors, num_of_model = {}, None
    for path in sorted(folder.glob("model-*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
            num_of_model = int(file.metadata()["tensors_of_model"])
    return tensors, num_of_model


def _changes_in_files(folder: Path, digests: Sequence[str]) -> dict[str, list[Change]]:
    """What later pushes changed in each tensor, in their order. Raises ValueError for other files than announced."""
    found: dict[str, list[Change]] = {}
    for number, expected in enumerate(digests):
        data = (folder / f"changes-{number:05}.safetensors").read_bytes()
        if hashlib.sha256(data).hexdigest() != expected:
            raise ValueError(f"{folder} holds other changes than were announced")
        entries = load(data)
        for key in entries:
            if (name := key.removeprefix("places:")) != key and len(entries[key]):
                found.setdefault(name, []).append((entries[key], entries[f"values:{name}"]))
    return found


def digest(tensors: Mapping[str, torch.Tensor], changes: Mapping[str, Sequence[Change]]) -> str:
    """Hex digest of the names, shapes, dtypes and at most 64 evenly spaced entries of each changed tensor.

    The same as `proximo.rollout.engine.fingerprint`.
    """
    result, sampled = hashlib.sha256(), {}
    for name, tensor in sorted(tensors.items()):
        result.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        flat = tensor.reshape(-1)
        step = -(-len(flat) // 64) or 1
        entries = flat[::step].clone()
        for places, values in changes.get(name, ()):
            hit = places % step == 0
            entries[places[hit].long() // step] = values[hit]
        sampled.setdefault(tensor.dtype, []).append(entries)
    for numbers in sampled.values():
        result.update(torch.cat(numbers).cpu().view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


def all_agree(problem: str | None) -> bool:
    """Whether no worker of this server has a problem. Each calls this at the same place.

    Raises ValueError in the last worker if one has: vLLM reads the workers' replies in their order, ends at the first
    that failed, and takes what is left for the replies to its next call.
    """
    groups, failed = (get_tp_group(), get_pp_group()), torch.tensor(int(problem is not None))
    for group in groups:
        if group.world_size > 1:
            group.cpu_group.allreduce([failed]).wait()
    if failed and all(group.is_last_rank for group in groups):
        raise ValueError(problem or "another worker of this server could not load the weights")
    return not failed


class _Handle(ctypes.Structure):
    """Identifies memory of a device for another process. The driver takes it by value."""

    _fields_ = (("bytes", ctypes.c_char * 64),)


def host_of(device: torch.device) -> str:
    """The machine of a worker's GPU, until it boots again; of a worker without one its device."""
    return BOOT.read_text(encoding="ascii").strip() if device.type == "cuda" else device.type


def opened(handle: bytes, size: int, device: torch.device) -> tuple[torch.Tensor, Callable[[], None]]:
    """The bytes of another process' memory, as this device reads them, and what closes it. Raises OSError.

    The memory may be that of another GPU, which this one must reach (NVLink, PCIe) and this process need not see.
    """
    library, address = driver(), ctypes.c_uint64()

    def call(name: str, *arguments: Any) -> None:
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context that of this thread; nothing reads any more
            if status := getattr(library, name)(*arguments):
                raise OSError(f"{name} of the CUDA driver failed with status {status}")

    call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), ctypes.c_uint(1))
    return tensor_at(address.value, size, device), lambda: call("cuIpcCloseMemHandle", address)


def driver() -> ctypes.CDLL:
    """The CUDA driver. Raises OSError if there is none."""
    return ctypes.CDLL("libcuda.so.1")


def tensor_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """The bytes at an address that the device can read. The tensor does not own them."""
    # Not by the address' array interface: that asks whose memory it is, and copies all of it from another device.
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


WeightTransferEngineFactory.register_engine("proximo", Transfer)


class Worker:
    """Makes vLLM import this file in its workers. It adds no methods."""
