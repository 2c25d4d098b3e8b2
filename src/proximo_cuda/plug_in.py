"""The entry point: what the core gets from this package. Importing it loads no torch."""

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from proximo.kernels import Capture, DecodingKernels, Kernels
from proximo_cuda.needs import NEEDED, has_triton, is_installed

if TYPE_CHECKING:  # torch takes a second to import
    import torch
    from torch import Tensor


class CUDAKernels(Kernels):
    """Kernels for devices of type `cuda`. Triton compiles at the first call."""

    @cached_property
    def row_operations(self) -> "Callable[[Tensor], Any]":
        """A tensor -> the row kernels; None where `row_kernels_for` gives None."""
        if not has_triton():
            return lambda _: None
        from proximo_cuda.row_kernels import row_kernels_for

        return row_kernels_for

    def passes(self, *, half: bool) -> Mapping[str, Any]:
        """Fused layers and decoding. `half`: with products in bf16."""
        if not is_installed():
            return {}
        from proximo_cuda.decoder import decoder_of, fused_layers

        return {"layers": partial(fused_layers, half=half), "decoder": decoder_of}

    def decoding(self, keys: "Tensor", values: "Tensor") -> DecodingKernels | None:
        """The kernels of `cache_kernels.py`; None where they are not right, or the tensors are not of a device."""
        if not (keys.is_cuda and has_triton()):
            return None
        from proximo_cuda.cache_kernels import kernels_for

        return kernels_for(keys, values)

    def capture(self, device: "torch.device") -> Capture | None:
        """CUDA graphs, with or without Triton; None without a device."""
        from proximo_cuda.graphs import capture_on

        return capture_on(device)

    def description(self) -> str | None:
        """The version of Triton; None without it."""
        return f"Triton {import_module('triton').__version__}" if has_triton() else None

    def why_missing(self) -> str | None:
        """In one line, why there are no kernels; None if there are."""
        missing = ", ".join(name for name in NEEDED if find_spec(name) is None)
        if not missing and not has_triton():
            missing = "a Triton that can be imported"
        return f"no kernels for cuda: {missing} is not installed, so torch's operators run" if missing else None
