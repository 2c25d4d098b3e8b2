"""A Llama of 7B on 8 and 64 ranks that do not exist: what rank 0 would hold, by torch's own FSDP2 on fake tensors."""

import multiprocessing as mp
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from proximo.config.devices import DevicesConfig
from proximo.config.run import OptimizerConfig
from proximo.models.heads import token_logprobs
from proximo.models.language import LanguageModel
from proximo.models.packing import pack_responses
from proximo.models.precision.placement import Precision
from proximo.models.transformers_model import decoder_layers
from proximo.plan.cost_model import Passes, StepCost
from proximo.plan.fake_tensor_profiler import GRADIENTS, building, shapes_only, to_fake_tensors
from proximo.plan.rank_memory import REDUCTION, Ranks, lay_out, rank_memory

GIB = 2**30
ADAMW = OptimizerConfig(learning_rate=1e-5)
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}
TOKENS = 64
WAYS: dict[str, dict[str, Any]] = {
    "8 ranks": {"num": 8},
    "8 ranks, reduced each time": {"num": 8, "reduce_gradients": "microbatch"},
    "8 ranks, gathered": {"num": 8, "shard": "grads"},
    "64 ranks": {"num": 64},
    "64 ranks, on the host": {"num": 64, "offload": "always"},
    "64 ranks, 8 copies": {"num": 64, "shard_size": 8},
}


def llama() -> LanguageModel:
    with building():
        plain = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE), dtype=torch.float32)
        model = LanguageModel(plain, precision=Precision.FLOAT32)
        model.use_activation_checkpointing()
    to_fake_tensors(model.model)
    return model


class Living(TorchDispatchMode):
    """All storages that operations made, for as long as anything holds them."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._storages:
                    self._storages[key] = weakref.ref(storage, lambda _, key=key: self._storages.pop(key, None))
        return outputs

    def nbytes(self) -> int:
        found = [reference() for reference in list(self._storages.values())]
        return sum(storage.nbytes() for storage in found if storage is not None)


def held(way: str, pipe: Any) -> None:
    """Bytes beside the weights and moments of rank 0, at each moment of an update of two micro-batches."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from proximo.distributed.sharding import mesh_of
    from proximo.distributed.world import World, using
    from proximo.run.make.sharding import shard_model

    torch.set_num_threads(1)
    devices = DevicesConfig(**WAYS[way])
    world = World()
    world.size, world.timeout_seconds = WAYS[way]["num"], 600.0
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world.size)
    mesh_of(world, torch.device("cpu"), shard_size=devices.shard_size)  # it reads numbers, which fake tensors have not
    notes: dict[str, list[int]] = {}
    with using(world), shapes_only(), Living() as living:
        model = llama()
        shard_model(model, devices, role="model")
        sharding = model.backbone.sharding
        assert sharding is not None
        parameters = list(model.model.parameters())
        weights = storage_bytes(parameters)
        optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
        model.model.train()
        before = living.nbytes()
        with watched(model, lambda moment: notes.setdefault(moment, []).append(living.nbytes() - before)):
            for is_last in (False, True):
                sharding.begin_microbatch(is_last=is_last)
                sharding.run(lambda: loss_of(model)).backward()
        gradients = storage_bytes([p.grad for p in parameters if p.grad is not None])
        optimizer.step()
        moments = storage_bytes([t for state in optimizer.state.values() for t in state.values()])
    pipe.send((weights, moments, gradients, notes))


def storage_bytes(tensors: list[Any]) -> int:
    storages = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def loss_of(model: LanguageModel) -> Tensor:
    batch = pack_responses([[0] * (TOKENS // 2)], [[0] * (TOKENS // 2)])
    hidden = model.hidden_states(batch.packed, batch.predictors)
    return -token_logprobs(hidden, model.head, batch.targets).logprobs.sum()


@contextmanager
def watched(model: LanguageModel, note: Any) -> Iterator[None]:
    def forward(_: nn.Module, __: Any, output: Tensor) -> None:
        note("forward")
        if output.requires_grad:
            output.register_hook(lambda _: note("backward"))

    handles = [layer.get_submodule("mlp").register_forward_hook(forward) for layer in decoder_layers(model.base)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.soak
@pytest.mark.parametrize("way", list(WAYS))
def test_a_rank_of_a_7b_model_holds_what_the_formula_says(way: str) -> None:
    devices = DevicesConfig(**WAYS[way])
    with shapes_only():
        model = llama()
        layout = lay_out({"policy": model}, Ranks(num=WAYS[way]["num"], devices=devices), lambda _: "model")
        placed = layout.models["policy"]
        whole = devices.reduce_gradients == "update"
        head = model.head.weight.numel() * 4  # whole until the end of the backward pass
        kept = placed.gradients if whole else placed.gradients // layout.ranks.shard_size + head
        passes = Passes(kind="train", modules=(model.model,), microbatches=2)
        cost = StepCost(parts={GRADIENTS: kept}, flops=0, tokens=0, heap=0, passes=(passes,))
        peak = rank_memory(layout, {"policy": ([model.model], ADAMW)}, cost, has_own_memory=False)
        moments = layout.moment_bytes([model.model], ADAMW)
    receiver, sender = mp.Pipe(duplex=False)
    process = mp.get_context("spawn").Process(target=held, args=(way, sender))
    process.start()
    assert receiver.poll(900), "no answer in 15 minutes"
    weights, state, gradients, notes = receiver.recv()
    process.join()
    most = max(note for each in notes.values() for note in each)
    predicted = sum(size for name, size in peak.items() if not name.endswith(("weights", "optimizer")))
    print(
        f"{way}: weights {weights / GIB:.3f} GiB, moments {state / GIB:.3f}, reduced gradients {gradients / GIB:.3f}; "
        f"beside them at most {most / GIB:.3f}, predicted {predicted / GIB:.3f}"
    )
    assert weights == pytest.approx(placed.weights, rel=1e-3)
    assert state == pytest.approx(moments, rel=1e-3)
    assert gradients == pytest.approx(placed.gradients // layout.ranks.shard_size, rel=1e-3)
    activations = 400 * 2**20
    assert predicted - peak[REDUCTION] - activations < most < predicted + activations
