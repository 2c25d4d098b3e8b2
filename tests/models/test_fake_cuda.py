"""What passes do on CUDA, followed by shapes and types: which kernel they take, on which device, in which type."""

import pytest
import torch

from architectures import build_architecture
from fake_cuda import CUDA, fake_cuda
from proximo.models.language import LanguageModel
from proximo.models.packing import pack_responses
from proximo.models.precision.placement import Precision

pytestmark = pytest.mark.filterwarnings("ignore:CUDA is not available")  # so says an autocast of its own

ON_ONE_KERNEL = ["llama", "qwen2", "qwen3", "mistral_window", "gpt2", "gpt_neox", "phi3"]


@pytest.mark.parametrize("name", ON_ONE_KERNEL)
def test_a_pass_in_bf16_takes_one_attention_kernel_for_each_layer(name: str) -> None:
    model = LanguageModel(build_architecture(name), precision=Precision.BF16)
    with fake_cuda(model.model) as kernels:
        batch = pack_responses([[3, 4, 5], [6, 7]], [[8, 9], [10, 11, 12]], device="cpu").to(CUDA)
        found = model.response_logprobs(batch).logprobs
    assert kernels.operators["_varlen_attn"] == 2
    assert found.device == CUDA
    assert found.dtype == torch.float32


def test_in_float32_there_is_one_call_for_each_sequence() -> None:
    model = LanguageModel(build_architecture("gpt2"))
    with fake_cuda(model.model) as kernels:
        batch = pack_responses([[3, 4, 5], [6, 7]], [[8, 9], [10, 11, 12]], device="cpu").to(CUDA)
        model.response_logprobs(batch)
    assert kernels.operators["_varlen_attn"] == 0
