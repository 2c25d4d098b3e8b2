"""CUDA graphs of decoding passes."""

import threading
from collections.abc import Callable
from contextlib import suppress

import torch


def capture_on(device: torch.device) -> "CUDACapture | None":
    """Of graphs with a pool of their own; None without a device, or beside the main thread.

    While a graph is captured, no other thread may wait for the whole device or empty its cache, as a learner may that
    trains while a thread samples.
    """
    alone = threading.current_thread() is threading.main_thread()
    return CUDACapture(device) if alone and torch.cuda.is_available() else None


class CUDACapture:
    """Captures graphs that share one pool of memory, since no two run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `proximo.kernels.Capture`. Raises RuntimeError for work that waits for the device."""
        with torch.cuda.device(self._device):
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            try:
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    work()
            except RuntimeError:
                # torch 2.11 and 2.12 leave their allocator in the capture that failed, and their stream behind.
                torch.cuda.set_stream(stream)
                with suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(stream.device_index, self._pool)
                raise
        return graph.replay
