"""The interface to kernels: an installed plug-in computes them in place of torch's operators, for one type of device.

A plug-in is a package with an entry point in the group `proximo.fast_paths`, named after the type of the device:

    [project.entry-points."proximo.fast_paths"]
    cpu = "proximo_cpu.plug_in:CPUKernels"

It is a subclass of `Kernels`, made without arguments once per process, when the kernels of its device are first asked
for. No other file asks whether there is a plug-in.
Importing this file loads no torch, and so does importing a plug-in.

Legend: T rows, B rows of a decode step, C rows of scores, I and O inputs and outputs of a layer, V vocabulary.
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

from proximo.errors import UserError

if TYPE_CHECKING:  # torch takes a second to import
    import torch
    from torch import Tensor

GROUP = "proximo.fast_paths"
"""The group of entry points."""

PACKAGE_FOR_CPU = "proximo_cpu"
"""The package in this wheel that brings kernels for a CPU."""

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Work on tensors at fixed addresses -> what does it again, without the host's work. It is not done meanwhile."""


class RowOperations(Protocol):
    """Kernels for rows of float32 numbers. Each gives what the caller's operators of torch give, but for rounding."""

    def token_statistics(
        self,
        scores: "Tensor",
        targets: "Tensor",
        normalisers: "Tensor",
        logprobs: "Tensor",
        entropies: "Tensor | None",
    ) -> None:
        """scores z [C, V], targets [C] int64: writes log sum exp z, log p of the target and the entropy, [C] each.

        For a target outside the vocabulary it raises IndexError, or the log-prob is NaN where the host does not wait.
        """
        ...

    def token_statistics_backward(  # noqa: PLR0917 - six tensors of one chunk
        self,
        scores: "Tensor",
        targets: "Tensor",
        normalisers: "Tensor",
        entropies: "Tensor",
        of_logprobs: "Tensor",
        of_entropies: "Tensor | None",
    ) -> None:
        """Overwrites scores [C, V] with their gradient, given those of log-probs and entropies [C].

        May raise IndexError for a target outside the vocabulary.
        """
        ...

    def sample(
        self, logits: "Tensor", *, streams: "Tensor", positions: "Tensor", temperature: float
    ) -> "tuple[Tensor, Tensor]":
        """logits [B, V], streams and positions [B] int64 -> the tokens [B] int64 that `rollout/sampling.py` draws from
        the full softmax at the temperature, and their log-probs [B]; NaN where logits are not finite."""
        ...

    def reads_few(self, rows: "Tensor") -> bool:
        """Whether `linear` may multiply these rows: few contiguous ones [B, I], in inference mode."""
        ...

    def linear(self, rows: "Tensor", weight: "Tensor", bias: "Tensor | None") -> "Tensor | None":
        """rows [B, I], weight [O, I] float32 or bf16, bias [O] -> x W' + b [B, O]; None to leave it to torch."""
        ...


class DecodingKernels(Protocol):
    """One new token in each of some rows of a cache: it is written, and attends to its row.

    Where the rows end is on the device. The host need not know it, so a pass can be a graph.
    """

    def put(
        self,
        keys: "Tensor",
        values: "Tensor",
        key: "Tensor",
        value: "Tensor",
        *,
        sources: "Tensor",
        rows: "Tensor",
        positions: "Tensor",
    ) -> None:
        """Write T tokens into storage [rows, H_kv, M, K] and [rows, H_kv, M, W], in place.

        key [1, H_kv, C, K], value [1, H_kv, C, W]; sources, rows, positions [T] int64: which of the C goes where.
        """
        ...

    def agree(self, query: "Tensor", keys: "Tensor", values: "Tensor", options: Any) -> bool:
        """Whether `attend` serves such a call. `options`: `AttentionOptions`."""
        ...

    def attend(
        self,
        query: "Tensor",
        keys: "Tensor",
        values: "Tensor",
        *,
        rows: "Tensor",
        positions: "Tensor",
        options: Any,
    ) -> "Tensor":
        """query [B, H, 1, K], storage as above, rows and positions [B] int64 -> [B, 1, H, W].

        The new token of row `rows[b]` is at `positions[b]`, and attends to the tokens up to itself.
        """
        ...


class Kernels:
    """The kernels of a plug-in on its device, which is a subclass. This class itself has none: torch's operators run.

    Each answer holds for the process, unless it depends on a tensor.
    """

    def begin(self) -> None:
        """Start slow preparations (a compiler) in the background. Called before torch is imported."""

    @property
    def row_operations(self) -> "Callable[[Tensor], RowOperations | None]":
        """A tensor -> the operations for rows like it; None where torch's operators must run."""
        return lambda _: None

    @property
    def bf16_product(self) -> "Callable[[Tensor], Callable[[Tensor, Tensor], Tensor] | None]":
        """A tensor -> the product of bf16 rows [T, I] and a bf16 matrix [O, I] on its device, [T, O] float32.

        I is even. None where operands are to be widened to float32 for torch's product.
        """
        return lambda _: None

    def passes(self, *, half: bool) -> Mapping[str, Any]:  # noqa: ARG002
        """Fields of `FastPath` (models/fast_path.py) that it fills. `half`: for passes in bf16."""
        return {}

    def decoding(self, keys: "Tensor", values: "Tensor") -> "DecodingKernels | None":  # noqa: ARG002
        """The kernels for a cache whose keys and values lie like these; None where torch's operators must run."""
        return None

    def capture(self, device: "torch.device") -> Capture | None:  # noqa: ARG002
        """Makes graphs of work on the device, in this thread; None where there are none."""
        return None

    def description(self) -> str | None:
        """Everything that decides the bits of its results, in one line, for the record of a run and its resumption.

        None where torch's operators run.
        """
        return None

    def why_missing(self) -> str | None:
        """In one line, why torch's operators run; None if nothing is missing."""
        return None


class _MissingKernels(Kernels):
    """Of a device whose kernels come with the wheel, where they are not installed."""

    def why_missing(self) -> str:
        return f"no kernels for a cpu: the package {PACKAGE_FOR_CPU} is not installed, so torch's operators run"


def kernels_of(device: str) -> Kernels:
    """The kernels of a device, such as `cpu` or `cuda:1`.

    Raises UserError if its plug-in cannot be loaded, or if two plug-ins are for it.
    """
    return _loaded(device.partition(":")[0])


@cache
def _loaded(device: str) -> Kernels:
    found = list(entry_points(group=GROUP, name=device))
    if not found:
        return _MissingKernels() if device == "cpu" else Kernels()
    if len(found) > 1:
        raise UserError(
            f"one plug-in can bring the kernels for {device}, and {len(found)} are installed: "
            f"{', '.join(map(_named, found))}; uninstall all but one"
        )
    try:
        return found[0].load()()
    except (ImportError, AttributeError, TypeError) as error:
        raise UserError(
            f"the plug-in {_named(found[0])} for {device} could not be loaded ({type(error).__name__}: {error}); "
            "install it again, or uninstall it to run without it"
        ) from error


def row_operations(like: "Tensor") -> RowOperations | None:
    """The operations of the tensor's device for rows like it; None where torch's operators must run."""
    return kernels_of(like.device.type).row_operations(like)


def bf16_product(like: "Tensor") -> "Callable[[Tensor, Tensor], Tensor] | None":
    """The product of bf16 operands with a float32 result on the tensor's device, where a plug-in has one."""
    return kernels_of(like.device.type).bf16_product(like)


def _named(entry: Any) -> str:
    return f"{entry.value} of {entry.dist.name}" if entry.dist is not None else entry.value
