"""CUDA graphs of decoding passes."""

from collections.abc import Callable

import torch


def new_capture() -> "CUDACapture | None":
    """Of graphs with a pool of their own; None without a device."""
    return CUDACapture() if torch.cuda.is_available() else None


class CUDACapture:
    """Captures graphs that share one pool of memory: no two run at a time, and none keeps anything in it."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `proximo.kernels.Capture`. Raises RuntimeError for work that waits for the device."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # Other threads, such as a learner's, may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                work()
        finally:
            torch.cuda.set_stream(stream)  # torch leaves its own behind where a capture fails
        return graph.replay
