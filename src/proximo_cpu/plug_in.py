"""The entry point: what the core gets from this package. Importing it loads no torch."""

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from proximo.kernels import Kernels
from proximo_cpu.build import begin_build

if TYPE_CHECKING:  # torch takes a second to import
    from torch import Tensor

    from proximo_cpu.row_kernels import RowKernels


class CPUKernels(Kernels):
    """Kernels for devices of type `cpu`."""

    def begin(self) -> None:
        """Compile the kernels in the background, where this machine has not kept them."""
        begin_build()

    @cached_property
    def row_operations(self) -> "Callable[[Tensor], RowKernels | None]":
        """A tensor -> the row kernels; None where `kernels_for` (library.py) gives None."""
        from proximo_cpu.row_kernels import row_kernels_for

        return row_kernels_for

    @cached_property
    def bf16_product(self) -> "Callable[[Tensor], Callable[[Tensor, Tensor], Tensor] | None]":
        """A tensor -> `bf16.product`; None where the processor lacks the instruction."""
        from proximo_cpu.bf16 import product_for

        return product_for

    def passes(self, *, half: bool) -> Mapping[str, Any]:
        """Attention, fused layers and decoding. `half`: with products in bf16."""
        from proximo_cpu.attention import KernelAttention
        from proximo_cpu.decoder import KernelDecoder
        from proximo_cpu.fused_layers import FusedLayers

        return {
            "attention": KernelAttention,
            "layers": partial(FusedLayers.of, half=half),
            "decoder": KernelDecoder.decode_of,
        }

    def description(self) -> str | None:
        """Compiler and fingerprint of the kernels in C; None without them."""
        from proximo_cpu.library import describe_kernels

        return describe_kernels()

    def why_missing(self) -> str | None:
        """In one line, why there are no kernels in C; None if there are."""
        from proximo_cpu.library import why_no_kernels

        return why_no_kernels()
