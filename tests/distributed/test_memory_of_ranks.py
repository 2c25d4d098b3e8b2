"""What a rank holds, measured on two ranks, is what `proximo plan` says; and how often ranks meet in an update."""

import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from builders import tiny_language_model
from distributed.paths import plain_paths
from distributed.ranks import Ranks
from proximo.config.devices import DevicesConfig
from proximo.config.run import OptimizerConfig
from proximo.learner.optimizers import OptimizerOptions
from proximo.learner.update import Learner
from proximo.models.heads import token_logprobs
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.packing import PackedResponses, pack_responses
from proximo.models.precision.placement import Precision
from proximo.models.scalar import HeadStart, ScalarModel
from proximo.models.sharing import base_alone, value_on_base
from proximo.models.transformers_model import decoder_layers
from proximo.plan.cost_model import Passes, StepCost
from proximo.plan.fake_tensor_profiler import GRADIENTS
from proximo.plan.rank_memory import REDUCTION, lay_out, rank_memory
from proximo.plan.rank_memory import Ranks as PlannedRanks
from proximo.run.make.sharding import shard_model

LAYERS = 4
ADAMW = OptimizerConfig(learning_rate=1e-3)
WAYS: dict[str, dict[str, Any]] = {
    "replicate": {"shard": "replicate"},
    "grads": {"shard": "grads"},
    "full": {"shard": "full"},
    "full, reduced each time": {"shard": "full", "reduce_gradients": "microbatch"},
}
SMALL = 1000
"""Bytes of token ids, positions and losses, and of what torch keeps of a first pass."""
ACTIVATIONS = 100_000
"""At most, of the four tokens of a micro-batch."""
HEADS = 2 * 130 * 64 * 2
"""The operands of the output layer in bf16, which an update keeps."""
MATRICES = 2 * LAYERS * (4 * 64 * 64 + 3 * 64 * 128)
"""Of a whole model under bf16: copies, which an update keeps."""
KERNELS = 200_000
"""Of buffers that the kernels of whole models on a CPU keep."""


def language_model(precision: Precision) -> LanguageModel:
    options = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS}
    return LanguageModel(tiny_language_model(vocab_size=130, seed=1, **options), precision=precision)


class Planned:
    """The formulas of one way to lie on two ranks."""

    def __init__(self, way: str, precision: Precision) -> None:
        self.devices = DevicesConfig(**WAYS[way])
        model = language_model(precision)
        self.module = model.model
        self.layout = lay_out({"policy": model}, PlannedRanks(num=2, devices=self.devices), lambda _: "model")
        self.model = self.layout.models["policy"]
        self.moments = self.layout.moment_bytes([self.module], ADAMW)

    @property
    def kept(self) -> int:
        """Bytes of gradients between micro-batches."""
        whole = not self.model.is_sharded or self.devices.reduce_gradients == "update"
        return self.model.gradients if whole else self.model.gradients // 2

    def passes(self, kind: Literal["train", "read", "rollout"], microbatches: int) -> Passes:
        return Passes(kind=kind, modules=(self.module,), microbatches=microbatches)

    def peak(self) -> dict[str, int]:
        """Of an update of two micro-batches, but for activations."""
        parts, passes = {GRADIENTS: self.kept}, (self.passes("train", 2),)
        cost = StepCost(parts=parts, flops=0, tokens=0, heap=0, passes=passes)
        return rank_memory(self.layout, {"policy": ([self.module], ADAMW)}, cost, has_own_memory=True)


def live_bytes() -> int:
    """Bytes of all tensors that were made since `gc.freeze()` and that this process can reach."""
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if isinstance(each, Tensor) and type(each) is not DTensor:
            for tensor in (each, each.grad if each.is_leaf else None):
                if isinstance(tensor, Tensor) and type(tensor) is not DTensor:
                    storage = tensor.untyped_storage()
                    found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def settled_bytes() -> int:
    """The least of `live_bytes` of fifty looks, each after a rest.

    A thread of gloo frees the sum of the gradients a moment after the main thread has it.
    """
    found = []
    for _ in range(50):
        time.sleep(0.01)  # a thread that waits for a processor gets one as often as this one
        found.append(live_bytes())
    return min(found)


COLLECTIVES = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
}


class Collectives(TorchDispatchMode):
    """Counts collectives of models and gradients, and the bytes of what they bring together."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.size: Counter[str] = Counter()

    def found(self) -> dict[str, tuple[int, int]]:
        return {name: (count, self.size[name]) for name, count in self.count.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = COLLECTIVES.get(func._schema.name.removeprefix("c10d::"))
        if name is not None:
            whole = args[1] if name == "reduce-scatter" else args[0]
            self.count[name] += 1
            self.size[name] += sum(each.nbytes for each in tree_leaves(whole) if isinstance(each, Tensor))
        return func(*args, **(kwargs or {}))


class Run:
    """A learner of one model on this rank, watched."""

    def __init__(self, devices: DevicesConfig, precision: Precision) -> None:
        self.model = language_model(precision)
        shard_model(self.model, devices, role="model")
        self.learner = Learner(
            self.model.model,
            OptimizerOptions(learning_rate=1e-3),
            num_updates=9,
            sharding=self.model.backbone.sharding,
        )
        self.batches = [pack_responses([[1, 2]], [[3, 4]]) for _ in range(2)]
        self.at: dict[str, list[int]] = {}

    def note(self, moment: str, count: Callable[[], int] = live_bytes) -> None:
        self.at.setdefault(moment, []).append(count())

    def update(self, rounds: int) -> None:
        def loss(batch: PackedResponses) -> tuple[Tensor, None]:
            self.note("start of a micro-batch")
            hidden = self.model.hidden_states(batch.packed, batch.predictors)
            value = -token_logprobs(hidden, self.model.head, batch.targets).logprobs.sum()
            self.note("end of forward")
            return value, None

        def guard(_: Any) -> None:
            self.note("end of backward", settled_bytes)

        self.learner.update(self.batches[:rounds], loss, guard=guard)
        self.note("idle", settled_bytes)

    @contextmanager
    def watched_layers(self) -> Iterator[None]:
        """Note the bytes while a layer runs, forward and backward."""
        handles = []
        for layer in decoder_layers(self.model.base):
            inside: Any = layer.get_submodule("mlp")

            def forward(_: Any, __: Any, output: Tensor) -> None:
                self.note("in a layer, forward")
                if output.requires_grad:
                    output.register_hook(lambda _: self.note("in a layer, backward"))

            handles.append(inside.register_forward_hook(forward))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def tensors(self) -> dict[str, int]:
        """Bytes of parameters and of moments, each from its own list."""
        state = [t for each in self.learner.optimizer.state.values() for t in each.values() if isinstance(t, Tensor)]
        return {
            "weights": storage_bytes([*self.model.model.parameters(), *self.model.model.buffers()]),
            "moments": storage_bytes(state),
        }


def storage_bytes(tensors: list[Tensor]) -> int:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}.values())


IN_PAIRS = [
    ("replicate", Precision.FLOAT32),
    ("grads", Precision.BF16),
    ("full", Precision.BF16),
    ("full, reduced each time", Precision.FLOAT32),
]


@pytest.mark.parametrize(("way", "precision"), IN_PAIRS)
def test_a_rank_holds_what_the_formula_says(two: Ranks, way: str, precision: Precision) -> None:
    check_memory(two, way, precision)


@pytest.mark.soak
@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.BF16], ids=["float32", "bf16"])
@pytest.mark.parametrize("way", list(WAYS))
def test_a_rank_holds_what_the_formula_says_in_every_way(two: Ranks, way: str, precision: Precision) -> None:
    check_memory(two, way, precision)


def check_memory(two: Ranks, way: str, precision: Precision) -> None:
    """At idle, at the start of a micro-batch, within each layer forward and backward, and at the end of backward."""
    plan = Planned(way, precision)
    model, layer, root = plan.model, plan.model.largest, plan.model.root.whole
    (tensors, at), (of_second, _) = two.run(memory, WAYS[way], precision)
    assert tensors == of_second == {"weights": model.weights, "moments": plan.moments}
    idle, (first, second) = at["idle"][0], at["start of a micro-batch"]
    assert idle - sum(tensors.values()) < (SMALL if model.is_sharded else KERNELS)
    assert at["end of backward"][0] - idle == pytest.approx(
        model.gradients // (2 if model.is_sharded else 1), abs=SMALL
    )
    copies = MATRICES if precision.is_half else 0
    start = {"replicate": copies, "grads": model.whole, "full": 2 * root}[model.shard]
    assert second - idle - start - plan.kept == pytest.approx(0, abs=SMALL + (HEADS if precision.is_half else 0))
    if not model.is_sharded:
        return
    assert first - idle == pytest.approx(2 * root, abs=SMALL)
    forward, backward = at["in a layer, forward"], at["in a layer, backward"]
    if model.shard == "full":
        # The layer at work, and the buffer of a gather: never a third one.
        for index, note in enumerate((*forward, *backward)):
            kept = plan.kept if index % (2 * LAYERS) >= LAYERS or index >= 2 * LAYERS else 0
            assert note - idle - root - kept < 3 * layer + (layer if index >= 2 * LAYERS else 0)
        assert (1 if precision.is_half else 2) * layer < forward[0] - idle - root < 2.7 * layer
    peak = plan.peak()
    most = max(note for notes in at.values() for note in notes)
    assert sum(peak.values()) - peak[REDUCTION] - ACTIVATIONS < most < sum(peak.values()) + ACTIVATIONS


@pytest.mark.parametrize("way", list(WAYS))
def test_gradients_are_reduced_once_per_update_whatever_the_accumulation(two: Ranks, way: str) -> None:
    """And weights are gathered once per update in `grads`, once per micro-batch in `full`, and once for a rollout."""
    for precision in (Precision.FLOAT32, Precision.BF16):
        model = Planned(way, precision).model
        found = two.run(exchanged, WAYS[way], precision)[0]
        one, several = found["train", 1], found["train", 2]
        if not model.is_sharded:
            assert one == several == {"all-reduce": (len(model.buckets), model.gradients)}
            continue
        times = {"grads": 1, "full": 2}[model.shard]
        assert several["all-gather"] == tuple(times * each for each in one["all-gather"])
        assert one["reduce-scatter"][1] == model.gradients
        each_time = 2 if way == "full, reduced each time" else 1
        assert several["reduce-scatter"] == tuple(each_time * each for each in one["reduce-scatter"])
        assert found["rollout", 1]["all-gather"][1] == model.whole


def on_one_base() -> dict[str, LanguageModel | ScalarModel]:
    """A policy with an adapter, and the models that run on its base. Two ranks cannot halve 131 rows."""
    options = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS}
    base = LanguageModel(tiny_language_model(vocab_size=131, seed=1, **options))
    policy = base.with_adapter(LoRAOptions(rank=2, alpha=4.0))
    value = value_on_base(policy, LoRAOptions(rank=2, alpha=4.0), HeadStart.ZERO)
    return {"policy": policy, "value": value, "reference": base_alone(policy)}


def shard_on_one_base(devices: dict[str, Any]) -> tuple[dict[str, int], int]:
    """Bytes of the shards of each role that no role before has, and most bytes of whole tensors on a device at once.

    A tensor that comes to the device is one that FSDP makes there; here it makes a copy.
    """
    models, arrived, most = on_one_base(), list[Any](), 0

    def arrive(parameters: list[Tensor], *_: Any) -> None:
        nonlocal most
        for parameter in parameters:
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.clone()
                arrived.append(weakref.ref(parameter.untyped_storage()))
        most = max(most, sum(storage.nbytes() for each in arrived if (storage := each()) is not None))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.fsdp._fully_shard._fsdp_init._move_states_to_device", arrive)
        for role, model in models.items():
            others = [other.model for other in models.values() if other is not model]
            shard_model(model, DevicesConfig(**devices), role=role, beside=others)
    seen: dict[int, int] = {}
    sizes = {}
    for role, model in models.items():
        local = [
            t.to_local() if isinstance(t, DTensor) else t for t in (*model.model.parameters(), *model.model.buffers())
        ]
        found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}
        sizes[role] = sum(size for key, size in found.items() if key not in seen)
        seen |= found
    return sizes, most


@pytest.mark.parametrize("way", ["grads", "full"])
def test_models_on_one_base_have_its_shards_once(two: Ranks, way: str) -> None:
    """And no more than one layer, or the root, comes to the device whole while they are sharded."""
    models = on_one_base()
    layout = lay_out(models, PlannedRanks(num=2, devices=DevicesConfig(**WAYS[way])), lambda role: role)
    policy = layout.models["policy"]
    for sizes, most in two.run(shard_on_one_base, WAYS[way]):
        for role, model in layout.models.items():
            assert sizes[role] == pytest.approx(model.weights, abs=SMALL), role
        assert most <= max(policy.largest, policy.root.whole)
    # Of the base, the reference has shards of its own where the ranks have other numbers of rows.
    uneven = [models["policy"].base.get_input_embeddings(), models["policy"].base.get_output_embeddings()]
    assert layout.models["reference"].weights == pytest.approx(sum(66 * 64 * 4 for _ in uneven), abs=SMALL)


def memory(devices: dict[str, Any], precision: Precision) -> tuple[dict[str, int], dict[str, list[int]]]:
    with plain_paths():
        first = Run(DevicesConfig(**devices), precision)
        first.note = lambda *_: None  # not one look before `gc.freeze()`, while there are 400,000 objects
        first.update(2)  # kernels keep the buffers of their first pass
        gc.collect()
        gc.freeze()
        run = Run(DevicesConfig(**devices), precision)
        run.note = lambda *_: None  # nor in the update that makes the moments
        run.update(2)
        del run.note
        with run.watched_layers():
            run.update(2)
    gc.unfreeze()
    return run.tensors(), run.at


def exchanged(devices: dict[str, Any], precision: Precision) -> dict[tuple[str, int], dict[str, tuple[int, int]]]:
    run = Run(DevicesConfig(**devices), precision)
    run.note = lambda *_: None  # no bytes are wanted, and each look walks over all objects
    run.update(1)
    backbone, found = run.model.backbone, {}
    for rounds in (1, 2):
        with Collectives() as collectives:
            run.update(rounds)
        found["train", rounds] = collectives.found()
    with Collectives() as collectives, torch.no_grad(), backbone.at_work():
        for batch in run.batches:
            backbone.run_pass(lambda packed=batch.packed: run.model.hidden_states(packed))
    found["read", 2] = collectives.found()
    with Collectives() as collectives, backbone.gathered():
        pass
    found["rollout", 1] = collectives.found()
    return found
