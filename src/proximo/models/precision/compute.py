"""The dtype in which a pass computes its products, and the casts to it.

Under bf16, weights stay float32. `casting` keeps the cast weights, so that code in which weights do not change (an
update, a rollout, a call that reads) casts each weight once. Activations are cast at the input of a product, once if
several products read them. A gradient returns through the same cast, so it is summed in the weight's own dtype.
"""

import weakref
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers.pytorch_utils import Conv1D

Make = Callable[[Tensor], Tensor]


class Casts:
    """Converted copies of weights, each made once."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, Hashable], tuple[Tensor, Tensor]] = {}
        """(id of a weight, dtype or other name) -> the weight, kept so that its id stays unique, and its copy."""

    def of(self, weight: Tensor, what: Hashable, make: Make) -> Tensor:
        """The copy of a weight under the name `what`, by `make`."""
        key = id(weight), what
        if key not in self._kept:
            self._kept[key] = weight, make(weight)
        return self._kept[key][1]

    def put(self, weight: Tensor, what: Hashable, copy: Tensor) -> None:
        """Keep a copy that was made elsewhere."""
        self._kept[id(weight), what] = weight, copy


class FreedCasts(Casts):
    """Copies that live only while they are used: made again for each use, also in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[weakref.ref[Any], Tensor, Make]] = {}
        """Storage of a copy -> the weight, and how the copy is made again."""

    def of(self, weight: Tensor, what: Hashable, make: Make) -> Tensor:  # noqa: ARG002
        """A new copy of the weight."""
        copy = make(weight)
        storage = copy.untyped_storage()
        key = storage._cdata
        if key == weight.untyped_storage()._cdata:  # it has that type already
            return copy
        self._alive[key] = weakref.ref(storage, lambda _: self._alive.pop(key, None)), weight, make
        return copy

    def put(self, weight: Tensor, what: Hashable, copy: Tensor) -> None:
        """Does not keep the copy: `of` makes one for each use."""

    def not_saved(self) -> AbstractContextManager[None]:
        """Inside, autograd saves the weight in place of its copy."""
        return cast("AbstractContextManager[None]", saved_tensors_hooks(self._pack, self._unpack))

    def _pack(self, tensor: Tensor) -> "_Saved":
        found = self._alive.get(tensor.untyped_storage()._cdata)
        if found is None:
            return _Saved(tensor, tensor._version, None)
        _, weight, make = found
        return _Saved(weight, weight._version, (make, tensor.size(), tensor.stride(), int(tensor.storage_offset())))

    @staticmethod
    def _unpack(saved: "_Saved") -> Tensor:
        if saved.tensor._version != saved.version:
            raise RuntimeError("a tensor that the backward pass needs was changed in place: a weight stepped too early")
        if saved.again is None:
            return saved.tensor
        make, size, stride, offset = saved.again
        return make(saved.tensor).as_strided(size, stride, offset)


class _Saved(NamedTuple):
    """A tensor that autograd saved: itself, or the weight whose copy it is."""

    tensor: Tensor
    version: int
    again: tuple[Make, torch.Size, tuple[int, ...], int] | None
    """How the copy is made again, and the size, stride and offset of the view of it."""


_CASTS: ContextVar[Casts | None] = ContextVar("casts", default=None)


@contextmanager
def casting(kept: Casts | None = None, *, frees: bool = False) -> Generator[None]:
    """Inside, in this thread, each weight is cast only once. Weights must not change inside.

    A nested `casting` shares the casts of the outer one. `kept`: casts of the same weights from an earlier `casting`,
    to which those of this one are added. `frees`: each cast is freed after its use and made again in the backward pass,
    after which a weight may change.
    """
    if _CASTS.get() is not None:
        yield
        return
    freed = FreedCasts() if frees else None
    token = _CASTS.set(freed or kept or Casts())
    try:
        with nullcontext() if freed is None else freed.not_saved():
            yield
    finally:
        _CASTS.reset(token)


def keep_casts_in_recomputation() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of a checkpoint: a recomputation uses the casts of its forward pass.

    Autograd recomputes in a thread of the device, where no `casting` is on.
    """
    return nullcontext(), using_casts(_CASTS.get())


def current_casts() -> Casts | None:
    """The casts of the `casting` around, for a backward pass, which may run in another thread."""
    return _CASTS.get()


@contextmanager
def using_casts(casts: Casts | None) -> Generator[None]:
    """Inside, in this thread, weights are cast only if these casts lack them."""
    token = _CASTS.set(casts)
    try:
        yield
    finally:
        _CASTS.reset(token)


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 weight in another dtype. The copy is cached inside `casting`."""
    return _kept_cast(weight, dtype, _CASTS.get() or Casts())


def joined_cast(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Float32 weights in another dtype, [O, I] each, one below the other. Their own casts are parts of it.

    Needs a `casting` around.
    """
    casts = _CASTS.get()
    assert casts is not None, "without casting, a weight would be kept twice"
    joined = torch.cat([_kept_cast(weight.detach(), dtype, Casts()) for weight in weights])
    for weight, part in zip(weights, joined.split([len(weight) for weight in weights]), strict=True):
        casts.put(weight, dtype, part)
    return joined


def remembered(weight: Tensor, what: Hashable, make: Make) -> Tensor:
    """The result of `make(weight)`, cached inside `casting` under the name `what`."""
    return (_CASTS.get() or Casts()).of(weight, what, make)


def _kept_cast(weight: Tensor, dtype: torch.dtype, casts: Casts) -> Tensor:
    if weight.dtype is not torch.float32:
        return weight
    copy = casts.of(weight, dtype, lambda whole: whole.detach().to(dtype))
    return _CopyOfWeight.apply(weight, copy) if weight.requires_grad and torch.is_grad_enabled() else copy


class _CopyOfWeight(torch.autograd.Function):
    """The kept copy, with a separate autograd node to the weight for every use.

    Autograd runs the latest node first. If all passes shared the node of one cast, made in the first pass, the
    backward pass of the second would run it last, and hold the gradients of all copies until then.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.dtype), None


class Compute:
    """One pass that computes its products in `dtype`. float64 tensors stay float64."""

    def __init__(self, dtype: torch.dtype, products: "Products", *, is_compiled: bool = False) -> None:
        """`products`: the products that use the dtype. `is_compiled`: the layers run through torch.compile."""
        self.dtype = dtype
        self.products = products
        self.is_compiled = is_compiled
        self.casts = _CASTS.get() or Casts()
        self._last: tuple[Tensor, Tensor] | None = None

    def narrow(self, tensor: Tensor) -> Tensor:
        """An activation in the dtype of the pass. Consecutive products of the same activation share one cast."""
        if tensor.dtype is not torch.float32:
            return tensor
        if self._last is None or self._last[0] is not tensor:
            self._last = tensor, tensor.to(self.dtype)
        return self._last[1]

    def forget(self) -> None:
        """Release the activation that was cast last."""
        self._last = None

    def weight(self, weight: Tensor) -> Tensor:
        """A weight, cast once in this pass, or in the `casting` around it."""
        return _kept_cast(weight, self.dtype, self.casts)


_COMPUTE: ContextVar[Compute | None] = ContextVar("compute", default=None)


@contextmanager
def computing(compute: Compute | None) -> Generator[None]:
    """Inside, in this thread, passes through layers use this `Compute`; None for the dtypes of their weights."""
    token = _COMPUTE.set(compute)
    try:
        with nullcontext() if compute is None else compute.products.at_work(compute):
            yield
    finally:
        if compute is not None:
            compute.forget()
        _COMPUTE.reset(token)


def current_compute() -> Compute | None:
    """The `Compute` of the current pass; None if it computes in the dtypes of its weights."""
    return _COMPUTE.get()


def to_compute_type(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast float32 queries, keys and values to the dtype of the current pass."""
    compute = _COMPUTE.get()
    if compute is None:
        return tensors
    return tuple(each.to(compute.dtype) if each.dtype is torch.float32 else each for each in tensors)


class Products:
    """The plain matrix products of some layers, which compute in the dtype of the pass.

    During a pass they replace the `forward` of each module. Afterwards the modules are unchanged.
    """

    def __init__(self, layers: nn.Module) -> None:
        products = [(module, product) for module in layers.modules() if (product := _product(module))]
        self._forwards = [(module.__dict__, partial(product, module)) for module, product in products]
        self._linear = [module for module, product in products if product in (_linear, _conv1d)]
        self._tables = [module for module, product in products if product is _embedding]

    def at_work(self, compute: Compute) -> AbstractContextManager[None]:
        """Inside, the modules multiply in the dtype of a pass."""
        return self._with_cast_weights(compute) if compute.is_compiled else self._standing_in()

    @contextmanager
    def _with_cast_weights(self, compute: Compute) -> Generator[None]:
        """The modules' own code over weights that are cast already, for torch.compile. Autocast would be compiled too,
        and cast each weight in every pass, forward and again backward."""
        own = [
            (module._parameters, name, weight)
            for module in self._linear
            for name, weight in module._parameters.items()
            if weight is not None
        ]
        # A plain tensor may replace a parameter, as in torch.func.functional_call and parametrizations.
        for parameters, name, weight in own:
            parameters[name] = compute.weight(weight)  # ty: ignore[invalid-assignment]
        try:
            yield
        finally:
            for parameters, name, weight in own:
                parameters[name] = weight

    @contextmanager
    def _standing_in(self) -> Generator[None]:
        own = [(attributes, forward) for attributes, forward in self._forwards if "forward" not in attributes]
        for attributes, forward in own:
            attributes["forward"] = forward
        try:
            yield
        finally:
            for attributes, _ in own:
                del attributes["forward"]

    @property
    def matrices(self) -> list[nn.Parameter]:
        """Weights and biases of linear modules, each once. A pass reads them in its own dtype only."""
        return list(dict.fromkeys(each for module in self._linear for each in module.parameters(recurse=False)))

    @property
    def embeddings(self) -> list[nn.Parameter]:
        """Embedding tables, each once. Their outputs are float32."""
        return list(dict.fromkeys(each for module in self._tables for each in module.parameters(recurse=False)))


def _product(module: nn.Module) -> Callable[[Any, Tensor], Tensor] | None:
    """The replacement of a module's forward; None to keep it, as for quantised matrices."""
    from transformers.pytorch_utils import Conv1D

    if type(module) is nn.Linear and module.weight.is_floating_point():
        return _linear
    if type(module) is Conv1D:
        return _conv1d
    if type(module) is nn.Embedding and module.max_norm is None:
        return _embedding
    if _is_rms_norm(module):
        return _rms_norm
    return None


def _is_rms_norm(module: nn.Module) -> bool:
    """True for a norm of transformers with the same code as Llama's, as most architectures have."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    code, own = getattr(type(module).forward, "__code__", None), LlamaRMSNorm.forward.__code__
    if not type(module).__module__.startswith("transformers.") or code is None:
        return False
    return (code.co_code, code.co_names, code.co_consts) == (own.co_code, own.co_names, own.co_consts)


def _linear(module: nn.Linear, inputs: Tensor) -> Tensor:
    """x W' + b, in the dtype of the pass."""
    compute = _COMPUTE.get()
    if compute is None:
        return functional.linear(inputs, module.weight, module.bias)
    bias = None if module.bias is None else compute.weight(module.bias)
    return functional.linear(compute.narrow(inputs), compute.weight(module.weight), bias)


def _embedding(module: nn.Embedding, inputs: Tensor) -> Tensor:
    """Rows of a table; where that is bf16 (`narrow_frozen`), as float32, since the residual stream begins with them."""
    rows = nn.Embedding.forward(module, inputs)
    return rows.float() if rows.dtype is torch.bfloat16 else rows


def _rms_norm(module: Any, inputs: Tensor) -> Tensor:
    """w x / rms(x) of float32 rows: one kernel on CUDA, while the module's own code has six; equal bits on a CPU."""
    if not inputs.dtype is module.weight.dtype is torch.float32:  # Qwen3 norms queries and keys, which are bf16
        return type(module).forward(module, inputs)
    return functional.rms_norm(inputs, module.weight.shape, module.weight, module.variance_epsilon)


def _conv1d(module: "Conv1D", inputs: Tensor) -> Tensor:
    """x W + b, as GPT-2 keeps its matrices."""
    compute = _COMPUTE.get()
    if compute is None:
        return type(module).forward(module, inputs)
    weight, bias = compute.weight(module.weight), compute.weight(module.bias)
    rows = compute.narrow(inputs).view(-1, inputs.shape[-1])
    return torch.addmm(bias, rows, weight).view(*inputs.shape[:-1], weight.shape[-1])
