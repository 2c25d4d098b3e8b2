"""Runs inside vLLM's worker processes, in vLLM's own environment: loads the weights that a trainer wrote to files.

vLLM imports this file by the name of `Worker` (`--worker-extension-cls`). It imports nothing of Proximo, which is not
in that environment. The transfer engine is vLLM's own interface: start, update, finish.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class FileInit(WeightTransferInitInfo):
    """Files need no preparation."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """The place and the contents of the weights."""

    path: str
    digest: str


class FileTransfer(WeightTransferEngine[FileInit, FileUpdate]):
    """Loads tensors from a folder of safetensors files, by their names in the checkpoint. Others keep their values."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Does nothing: files need no connection."""

    def start_weight_update(self) -> None:
        """Nothing to do. Layers are opened once the files have proved good, and closed in the same call."""

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Load the files, if they are those of the trainer."""
        tensors, num_of_model = {}, None
        for path in sorted(Path(update_info.path).glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
                num_of_model = int(file.metadata()["tensors_of_model"])
        found = digest(tensors)
        if found != update_info.digest:
            raise ValueError(f"{update_info.path} holds other weights than were announced: {found}")
        # On a CPU matrices are packed for its products: layers are opened, filled, and packed again. An open layer
        # cannot sample, so none stays open, also where the tensors do not fit the model.
        initialize_layerwise_reload(self.model)
        try:
            loaded = self._fill(tensors)
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
            self._pack_heads()
        if len(tensors) == num_of_model and loaded is not None and (missing := self._plain_parameters() - loaded):
            raise ValueError(f"the trainer's model has no {min(missing)}, which the server's has")

    def _fill(self, tensors: Mapping[str, torch.Tensor]) -> set[str] | None:
        """Load all tensors. Returns the names of the parameters that they went into, where the model says so."""
        given = []

        def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors.items():
                given.append(name)
                yield name, tensor

        try:
            return self.model.load_weights(one_by_one())
        except Exception as error:  # of any kind: each model of vLLM checks names and shapes in its own way
            tensor = f"{given[-1]} of shape {tuple(tensors[given[-1]].shape)}" if given else "the files"
            raise ValueError(f"the server's model has no place for {tensor}: {error!r:.200}") from error

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
        """Does nothing: no connection is open."""


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hex digest of the names, shapes, dtypes and at most 64 evenly spaced entries of each tensor.

    The same as `proximo.rollout.engine.fingerprint`.
    """
    result, sampled = hashlib.sha256(), {}
    for name, tensor in sorted(tensors.items()):
        result.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        flat = tensor.reshape(-1)
        sampled.setdefault(tensor.dtype, []).append(flat[:: -(-len(flat) // 64) or 1])
    for numbers in sampled.values():
        result.update(torch.cat(numbers).view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


WeightTransferEngineFactory.register_engine("proximo", FileTransfer)


class Worker:
    """Makes vLLM import this file in its workers. It adds no methods."""
