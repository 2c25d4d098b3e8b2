"""Profiles memory and FLOPs of a pass over fake tensors, which have shapes but no data.

Every operation runs as it would on a CPU, so recomputed and frozen layers, adapters and casts are counted, not guessed.
Experts whose tokens are sorted by expert and multiplied group by group have shapes that do not depend on the data;
those that run in a loop over the experts that were chosen cannot be profiled.
"""

import weakref
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel

from proximo.models.fast_path import PART_SCOPE
from proximo.models.transformers_model import base_of, decoder_layers, is_adapted

WORKING = "working"
"""The default part: temporaries, and gradients of activations in a backward pass."""
GRADIENTS = "gradients"
"""Gradients of parameters."""
ACTIVATIONS = ("attention", "mlp", "norms", "between layers")
"""Parts of a model's activations. `between layers`: residual stream, embeddings and rotary factors."""
LARGEST_HEAP_BLOCK = 32 * 2**20
"""Bytes. glibc allocates larger blocks with mmap and returns them to the system when freed
(DEFAULT_MMAP_THRESHOLD_MAX)."""


def shapes_only() -> AbstractContextManager[object]:
    """A context in which all new tensors are fake. They can only be used inside it."""
    return _Shapes()


class _Shapes(FakeTensorMode):
    """Survives `deepcopy` of a model, so that the copy's fake tensors belong to the same mode."""

    def __deepcopy__(self, memo: Any) -> "_Shapes":
        return self


@contextmanager
def building() -> Generator[None]:
    """Build models on the meta device, inside `shapes_only()`, which transformers and peft support."""
    with unset_fake_temporarily(), torch.device("meta"):
        yield


def to_fake_tensors(*models: nn.Module) -> None:
    """Replace meta parameters and buffers by fake tensors of `shapes_only()`, in place. Shared tensors stay shared."""
    new: dict[int, Tensor] = {}
    for module in dict.fromkeys(module for model in models for module in model.modules()):
        for name, old in module._parameters.items():
            if old is not None and id(old) not in new:
                empty = torch.empty(old.shape, dtype=old.dtype)
                new[id(old)] = nn.Parameter(empty, requires_grad=old.requires_grad)
            module._parameters[name] = None if old is None else new[id(old)]  # ty: ignore[invalid-assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in new:
                new[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
            module._buffers[name] = None if buffer is None else new[id(buffer)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Memory and FLOPs of profiled passes."""

    parts: Mapping[str, int]
    """Part -> bytes at the memory peak, without the weights."""
    flops: int
    """Floating-point operations of matrix products and attention, counted as torch.utils.flop_counter does."""
    heap: int = 0
    """Bytes at the peak of activations, gradients and temporaries in blocks that glibc keeps in its heap."""

    @property
    def peak(self) -> int:
        """Peak memory in bytes, without the weights."""
        return sum(self.parts.values())


class PassProfiler(TorchDispatchMode):
    """Counts memory and FLOPs while it is entered.

    A tensor is attributed to the part that is current when it is created.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        """`models`: those that run inside. Their weights are not counted; their layers decide the current part."""
        super().__init__()
        self.part = WORKING
        self.flops = 0
        self._held: Counter[str] = Counter()
        self._parts: dict[int, str] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._peak: dict[str, int] = {}
        self._heap = self._heap_at_peak = 0
        self._models = list(models)
        # Storages that are not counted: weights exist before the pass and are planned elsewhere.
        self._known = {_key(t) for m in self._models for t in (*m.parameters(), *m.buffers())}
        self._parts_before: list[str] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> "PassProfiler":
        for model in self._models:
            self._watch(model)
        self._scope_token = PART_SCOPE.set(self.attribute_to)
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        PART_SCOPE.reset(self._scope_token)
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def attribute_to(self, part: str) -> Generator[None]:
        """Attribute tensors that are created inside to `part`."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def reassign(self, tensor: Tensor, part: str) -> None:
        """Move a counted tensor to another part."""
        key = _key(tensor)
        if key in self._parts:
            size, before = tensor.untyped_storage().nbytes(), self._parts[key]
            self._held[before] -= size
            self._held[part] += size
            self._heap += self._in_heap(part, size) - self._in_heap(before, size)
            self._parts[key] = part

    def hold(self, part: str, size: int) -> None:
        """Count `size` more bytes from now on, for memory of the run that these passes do not allocate."""
        self._held[part] += size
        self._note_peak()

    def cost(self) -> Cost:
        """The cost of everything since the profiler was created."""
        return Cost(parts=dict(self._peak), flops=self.flops, heap=self._heap_at_peak)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; count its outputs and FLOPs."""
        kwargs = kwargs or {}
        # torch knows the shape of this one for bf16 alone.
        shaped = _grouped_product if func._overloadpacket is _GROUPED else func
        outputs = shaped(*args, **kwargs)
        count = _FLOPS.get(func._overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **kwargs, out_val=outputs))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor):
                self._track(tensor)
        return outputs

    def _track(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key in self._known or key in self._alive:
            return
        size = storage.nbytes()
        self._parts[key] = self.part
        # The callback runs when the last tensor of the storage is freed, as its memory would be. Views share a storage.
        self._alive[key] = weakref.ref(storage, lambda _: self._release(key, size))
        self._held[self.part] += size
        self._heap += self._in_heap(self.part, size)
        self._note_peak()

    def _note_peak(self) -> None:
        if self._held.total() > sum(self._peak.values()):
            self._peak = {part: held for part, held in self._held.items() if held}
            self._heap_at_peak = self._heap

    def _release(self, key: int, size: int) -> None:
        part = self._parts.pop(key)
        self._held[part] -= size
        self._heap -= self._in_heap(part, size)
        del self._alive[key]

    @staticmethod
    def _in_heap(part: str, size: int) -> int:
        return size if size < LARGEST_HEAP_BLOCK and part in (*ACTIVATIONS, WORKING, GRADIENTS) else 0

    def _watch(self, model: nn.Module) -> None:
        """Set the current part in hooks around each layer, also when it is recomputed in the backward pass."""
        base = base_of(model) if isinstance(model, PreTrainedModel) or is_adapted(model) else model
        self._name(base.base_model if isinstance(base, PreTrainedModel) else base, "between layers")
        for layer in decoder_layers(base) if isinstance(base, PreTrainedModel) else ():
            self._name(layer, "between layers")
            for name, module in layer.named_children():
                self._name(module, _part_of(name))
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._own_gradient))

    def _name(self, module: nn.Module, part: str) -> None:
        def enter(*_: Any) -> None:
            self._parts_before.append(self.part)
            self.part = part

        def leave(*_: Any) -> None:
            self.part = self._parts_before.pop()

        self._hooks.append(module.register_forward_pre_hook(enter))
        # always_call: a recomputed checkpointed layer raises to stop early, once the backward pass has what it needs.
        self._hooks.append(module.register_forward_hook(leave, always_call=True))

    def _own_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.reassign(parameter.grad, GRADIENTS)


def _key(tensor: Tensor) -> int:
    """Identifies the storage of a tensor while it is alive."""
    return tensor.untyped_storage()._cdata


def _part_of(name: str) -> str:
    """The part of a layer's child module, by the names that transformers uses."""
    if "norm" in name or name.startswith("ln_"):
        return "norms"
    return "attention" if "attn" in name or "attention" in name else "mlp"


def _attention_flops(query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of the scores and the weighted sum of values, without a discount for causality, as torch counts them."""
    rows, heads, length, width = query.shape
    return 4 * rows * heads * length * key.shape[2] * width


def _attention_backward_flops(_: Tensor, query: Tensor, key: Tensor, *__: Any, **___: Any) -> int:
    """FLOPs of recomputing the scores and of the gradients of scores, queries, keys and values."""
    return _attention_flops(query, key) * 5 // 2


def _addmm_flops(_: Tensor, first: Tensor, second: Tensor, *__: Any, **___: Any) -> int:
    """FLOPs of the product. torch's own formula does not take the `out_dtype` argument."""
    return 2 * first.shape[0] * first.shape[1] * second.shape[1]


def _grouped_product(first: Tensor, second: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """A tensor shaped like the products of groups, whose ends are `offs`.

    Either matrix, or both, may have the groups along a dimension that others share: [tokens, K] x [experts, K, N] is
    [tokens, N], [experts, M, K] x [K, tokens] is [M, tokens], and [M, tokens] x [tokens, N] is [experts, M, N].
    """
    shape = (first.shape[-2], second.shape[-1])
    if first.dim() == second.dim():
        shape = ((first.shape[0] if offs is None else offs.shape[0]), *shape)
    return first.new_empty(shape)


def _grouped_flops(first: Tensor, second: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of the products of groups that share a dimension: every token is in one group."""
    groups = first.shape[0] if first.dim() == second.dim() == 3 else 1
    return 2 * groups * first.shape[-2] * first.shape[-1] * second.shape[-1]


_GROUPED = torch.ops.aten._grouped_mm
_FLOPS: Mapping[Any, Any] = {
    **flop_registry,
    _GROUPED: _grouped_flops,
    # Operators that the registry lacks, or counts as if there were as many key heads as query heads.
    torch.ops.aten.addmm: _addmm_flops,
    torch.ops.aten.addmm_: _addmm_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
