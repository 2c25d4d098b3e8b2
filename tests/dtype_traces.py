"""Which operators saw which types, and what was cast. Not a fixture: a mode that a test puts around what it runs."""

from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
SHORT = {torch.float32: "float32", torch.bfloat16: "bf16"}


class DtypeTrace(TorchDispatchMode):
    """Counts operators by the types of what they were given, casts by their tensor, and waits for a device.

    A tensor is known by its storage, where it begins there, its shape and its version. All that is cast stays alive
    until the mode is left, so that no address comes twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.types: dict[Any, set[tuple[str, ...]]] = defaultdict(set)
        self.operators: Counter[str] = Counter()
        self.casts: Counter[tuple[Any, ...]] = Counter()
        self._cast: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operators[func._overloadpacket.__name__] += 1
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if given and given[0].is_floating_point():
            self.types[func._overloadpacket].add(tuple(SHORT.get(each.dtype, str(each.dtype)) for each in given))
        if (
            func._overloadpacket in (aten._to_copy, aten.to)
            and args[0].is_floating_point()
            and result.dtype != args[0].dtype
        ):
            self.casts[self._key(args[0], result.dtype)] += 1
        return result

    def _key(self, tensor: Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
        self._cast.append(tensor)
        where = tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        version = 0 if tensor.is_inference() else tensor._version
        return *where, version, *(SHORT.get(each, str(each)) for each in (tensor.dtype, dtype))

    @property
    def narrowed(self) -> int:
        """Casts from float32 to bf16."""
        return sum(count for key, count in self.casts.items() if key[-2:] == ("float32", "bf16"))

    @property
    def cast_twice(self) -> list[tuple[Any, ...]]:
        """Shapes of what was cast to the same type more than once."""
        return sorted(key[2] for key, count in self.casts.items() if count > 1)
