"""What a piece of work costs, counted and not timed: operations of matrices, tokens of passes, bytes of tensors.

Not fixtures: modes and hooks that a test puts around what it runs.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from proximo.models.fast_path import PART_SCOPE
from proximo.ppo.calls import Calls
from proximo.ppo.trainer import PPOTrainer

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward
BATCHED = (aten.bmm, aten.baddbmm)
"""What attention over short sequences is made of, and nothing else in a Llama."""


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside hold at one time, and the most elements of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.largest = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self._at_most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in given:
                self._hold(each)
        return result

    def _hold(self, made: Tensor) -> None:
        storage = made.untyped_storage()
        self._held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._at_most += storage.nbytes()
        self.largest = max(self.largest, made.numel())
        if self._at_most > self.peak:  # only then does it matter which of them are still there
            self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
            self._at_most = sum(size for _, size in self._held.values())
            self.peak = max(self.peak, self._at_most)


class Operations:
    """torch's own counter, with what it leaves out on a CPU: the product that adds up (addmm_), and fused attention.

    Attention counts as torch counts it elsewhere: the full square, and 2.5 times that backwards.
    """

    def __init__(self) -> None:
        self._mode = FlopCounterMode(
            display=False,
            custom_mapping={
                aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1],
                ATTENTION: lambda query, key, *_, **__: _attention(query, key),
                ATTENTION_BACKWARD: lambda _, query, key, *__, **___: 5 * _attention(query, key) // 2,
            },
        )

    def __enter__(self) -> "Operations":
        # The counter hooks every module, and hooked layers would run as modules: this says that it only looks on.
        self._naming = PART_SCOPE.set(lambda _: nullcontext())
        self._mode.__enter__()
        return self

    def __exit__(self, *given: Any) -> None:
        self._mode.__exit__(*given)
        PART_SCOPE.reset(self._naming)

    @property
    def _counts(self) -> dict[Any, int]:
        return self._mode.get_flop_counts()["Global"]

    @property
    def attention(self) -> int:
        """Of the fused kernel and of batched products."""
        return sum(count for kind, count in self._counts.items() if kind in (ATTENTION, ATTENTION_BACKWARD, *BATCHED))

    @property
    def matrices(self) -> int:
        """Everything else."""
        return sum(self._counts.values()) - self.attention


def _attention(query: Sequence[int], key: Sequence[int]) -> int:
    rows, heads, tokens, width = query
    return 4 * rows * heads * tokens * key[2] * width


class CountedTrainer(PPOTrainer):
    """A trainer whose calls are counted: name of a call -> the counter that was around it."""

    def __init__(self, *args: Any, counter: type[Any], **options: Any) -> None:
        super().__init__(*args, **options)
        self.counts = counts = dict[str, Any]()

        class Counting(Calls):
            def run(self, name: str, function: Any, *inputs: Any) -> Any:
                with counter() as counts[name]:
                    return super().run(name, function, *inputs)

        self.calls_type = Counting


class Passes:
    """The tokens that went through each model, pass by pass: what its input embedding was given."""

    def __init__(self, **models: nn.Module) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        for role, model in models.items():
            embedding = model.get_input_embeddings()
            embedding.register_forward_pre_hook(lambda _, given, role=role: self._note(role, given[0]))

    def _note(self, role: str, token_ids: Tensor) -> None:
        self.tokens[role].append(math.prod(token_ids.shape))
