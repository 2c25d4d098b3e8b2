"""The file that vLLM's workers import, without vLLM: its names are classes that know what that file asks of them."""

import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fake_driver import FakeDriver, tensor_at
from proximo.rollout.vllm import device_memory
from proximo.rollout.vllm.process import INSIDE

PACKAGES = ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer", "vllm.model_executor")
NAMES = {
    "vllm.distributed.weight_transfer.base": ("WeightTransferInitInfo", "WeightTransferUpdateInfo"),
    "vllm.model_executor.layers.vocab_parallel_embedding": ("ParallelLMHead", "VocabParallelEmbedding"),
}


class TransferEngine:
    """vLLM's base class: it makes the records of what a request says."""

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    def init(self: Any, info: dict[str, Any]) -> None:
        self.init_transfer_engine(self.init_info_cls(**info))

    def update(self: Any, info: dict[str, Any]) -> None:
        self.receive_weights(self.update_info_cls(**info))


def worker_file() -> Any:
    """A new module of the file."""
    modules = {name: ModuleType(name) for name in PACKAGES}
    for path, names in NAMES.items():
        modules[path] = made = ModuleType(path)
        for name in names:
            setattr(made, name, type(name, (), {}))
    modules["vllm.distributed.weight_transfer.base"].WeightTransferEngine = TransferEngine  # type: ignore[attr-defined]
    for path, functions in {
        "vllm.distributed.weight_transfer.factory": {
            "WeightTransferEngineFactory": type("Factory", (), {"register_engine": staticmethod(lambda *_: None)})
        },
        "vllm.distributed.parallel_state": {
            name: lambda: SimpleNamespace(world_size=1, is_last_rank=True) for name in ("get_tp_group", "get_pp_group")
        },
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda _: None,
            "finalize_layerwise_reload": lambda *_: None,
        },
    }.items():
        modules[path] = ModuleType(path)
        vars(modules[path]).update(functions)
    spec = importlib.util.spec_from_file_location("proximo_vllm", INSIDE / "proximo_vllm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    modules["proximo_vllm"] = module
    sys.modules.update(modules)
    try:
        spec.loader.exec_module(module)
    finally:  # not by patch.dict, which empties sys.modules for a moment: a thread that imports then imports all anew
        for name in modules:
            del sys.modules[name]
    return module


class Loading:
    """A model of vLLM, as far as a push sees it: what it loads, and which parameters it has."""

    def __init__(self, layers: nn.Module, prefix: str = "layers") -> None:
        self.layers, self.prefix = layers, prefix

    def modules(self) -> Any:
        return self.layers.modules()

    def named_modules(self) -> Any:
        return self.layers.named_modules(prefix=self.prefix)

    def load_weights(self, given: Any) -> set[str]:
        own = dict(self.layers.named_parameters(prefix=self.prefix, remove_duplicate=False))
        loaded = set()
        for name, tensor in given:
            if (place := own[name].data).shape != tensor.shape:
                raise RuntimeError("another shape")
            place.copy_(tensor)
            loaded.add(place.data_ptr())
        return {name for name, place in own.items() if place.data_ptr() in loaded}  # a tied one under both names


def share_device(monkeypatch: pytest.MonkeyPatch, folder: Path, *, host: str) -> FakeDriver:
    """Let memory of this machine, in files of the folder, be that of the learner's device."""
    driver = FakeDriver(folder)
    boot = folder / "boot_id"
    boot.write_text(f"{host}\n")
    for name, value in {"driver": lambda: driver, "SHAREABLE": "cpu", "tensor_at": tensor_at, "BOOT": boot}.items():
        monkeypatch.setattr(device_memory, name, value)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: driver.events.append("wait"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return driver
