"""What vLLM's worker imports in place of `proximo_vllm`, on a CPU: that file, with `fake_driver` for CUDA's.

PROXIMO_TEST_MEMORY names the folder that is the device's memory.
"""

import os
from contextlib import nullcontext
from pathlib import Path

import proximo_vllm  # ty: ignore[unresolved-import]  (vLLM's environment has it)
import torch

from fake_driver import FakeDriver, tensor_at

DRIVER = FakeDriver(Path(os.environ["PROXIMO_TEST_MEMORY"]))
torch.cuda.device, torch.cuda.synchronize = lambda _: nullcontext(), lambda *_: None  # type: ignore[assignment, misc]
proximo_vllm.device_of, proximo_vllm.driver, proximo_vllm.tensor_at = lambda _: "GPU-1", lambda: DRIVER, tensor_at
Worker = proximo_vllm.Worker
