"""What vLLM's worker imports in place of `proximo_vllm`, on a CPU: that file, with `fake_driver` for CUDA's.

PROXIMO_TEST_MEMORY names the folder that is the device's memory.
"""

import os
from contextlib import nullcontext
from pathlib import Path

import proximo_vllm  # ty: ignore[unresolved-import]  (vLLM's environment has it)
import torch

from fake_driver import FakeDriver

DRIVER = FakeDriver(Path(os.environ["PROXIMO_TEST_MEMORY"]))
torch.cuda.device, torch.cuda.synchronize = lambda _: nullcontext(), lambda *_: None  # type: ignore[assignment, misc]
proximo_vllm.host_of, proximo_vllm.driver = lambda _: "here", lambda: DRIVER
Worker = proximo_vllm.Worker
