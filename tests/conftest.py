"""Settings for all tests: one thread, no network, no accelerator-dependent default."""

import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

import shape_checks

shape_checks.install()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Thread count changes bits; one thread also keeps parallel test workers from fighting over cores."""
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(torch.float32)
