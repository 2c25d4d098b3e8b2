"""A GPU that is not there: tensors with shapes, types and the device `cuda`, and no numbers. For torch without CUDA.

Autograd and autocast of CUDA are not in such a build, so what runs here takes no gradient.
"""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda", 0)


class _Moves(TorchFunctionMode):
    """`tensor.to("cuda")` and `torch.tensor(..., device="cuda")`, which ask for a runtime that is not there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        on_cuda = bool(args) and isinstance(args[0], Tensor) and args[0].is_cuda
        if on_cuda and func in _ON_CUDA:
            return _ON_CUDA[func](*args, **given)
        if func is torch.tensor and _is_cuda(given.get("device")):
            return _moved(func(*args, **given | {"device": "cpu"}), given["device"])
        if func is Tensor.to and (device := next(filter(_is_cuda, (*args[1:], given.get("device"))), None)) is not None:
            return _moved(args[0], device)
        return func(*args, **given)


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


def _moved(tensor: Tensor, device: Any) -> Tensor:
    return torch.ops.aten._to_copy.default(tensor, device=torch.device(device))


def _indexed(tensor: Tensor, index: Any) -> Tensor:
    """`tensor[index]` by operators: Python's own way asks for the runtime."""
    places = index if isinstance(index, tuple) else (index,)
    named = sum(each is not None and each is not Ellipsis for each in places)
    dim = 0
    for each in places:
        if each is Ellipsis:
            dim += tensor.dim() - named
        elif each is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
        elif each == slice(None):
            dim += 1
        elif isinstance(each, slice):
            tensor, dim = torch.ops.aten.slice(tensor, dim, each.start, each.stop, each.step or 1), dim + 1
        elif isinstance(each, int):
            tensor = tensor.select(dim, each)
        else:
            tensor, dim = tensor.index_select(dim, each), dim + 1
    return tensor


def _assigned(tensor: Tensor, index: Any, value: Any) -> None:
    part = _indexed(tensor, index)
    if isinstance(value, Tensor):
        torch.ops.aten.copy_.default(part, value)
    else:
        part.fill_(value)


def _attention(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
    """One kernel, as on CUDA: a build without CUDA would take it apart."""
    mask = given.get("attn_mask")
    if mask is None:
        return functional.scaled_dot_product_attention(query, key, value, **given)
    bias = mask.expand(*query.shape[:3], key.shape[2])
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention.default
    return kernel(query, key, value, bias, compute_log_sumexp=False, scale=given["scale"])[0]


_ON_CUDA = {
    Tensor.__getitem__: _indexed,
    Tensor.__setitem__: _assigned,
    Tensor.copy_: torch.ops.aten.copy_.default,
    functional.scaled_dot_product_attention: _attention,
    functional.rms_norm: lambda inputs, *_, **__: torch.ops.aten.empty_like(inputs),  # likewise one kernel
}
"""Function -> what does it here, for tensors on the device."""


class Kernels(TorchDispatchMode):
    """The operators that ran inside, and the types of what attention was given."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_cuda(*models: nn.Module) -> Generator[Kernels]:
    """Inside, the models are on a device `cuda`, and tensors can be made there; none has numbers."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _Moves(), torch.no_grad(), Kernels() as kernels:
        for module in (each for model in models for each in model.modules()):
            for name, old in module._parameters.items():
                if old is not None:
                    module._parameters[name] = nn.Parameter(_moved(mode.from_tensor(old), CUDA), requires_grad=False)
            for name, old in module._buffers.items():
                if old is not None:
                    module._buffers[name] = _moved(mode.from_tensor(old), CUDA)
        kernels.operators.clear()
        yield kernels
