"""What only a device can show: the driver's memory in two processes, masks in graphs, layers compiled by inductor."""

import json
import subprocess
import sys
import warnings

import pytest
import torch

from builders import tiny_language_model, tiny_tokenizer
from inside_vllm import __file__ as INSIDE_VLLM
from proximo.models.language import LanguageModel
from proximo.models.packing import pack_responses
from proximo.models.precision.placement import Precision
from proximo.ppo.update.epochs import pack_members
from proximo.records import Prompt
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.rollout.vllm.device_memory import DeviceMemory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
OPEN = """
import base64, json, sys
sys.path.insert(0, sys.argv[1])
import torch
from inside_vllm import worker_file
sent, code, device = json.loads(sys.argv[2]), worker_file(), torch.device("cuda", 0)
assert code.host_of(device) == sent["host"]
tensor, close = code.opened(base64.b64decode(sent["handle"]), sent["size"], device)
print(tensor.device, int(tensor.sum()), tensor.view(torch.bfloat16).numel())
close()
"""


def model(precision: Precision) -> LanguageModel:
    return LanguageModel(
        tiny_language_model(vocab_size=512, initializer_range=0.2, **SHAPE).to(DEVICE), precision=precision
    )


def test_another_process_reads_the_memory_of_a_push() -> None:
    memory = DeviceMemory(DEVICE, 2**22)
    memory.bytes.copy_(torch.arange(2**22, device=DEVICE) % 251)
    torch.cuda.synchronize()
    folder = INSIDE_VLLM.rpartition("/")[0]
    command = [sys.executable, "-c", OPEN, folder, json.dumps(memory.as_sent())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    expected = int(memory.bytes.sum())
    memory.close()
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["cuda:0", str(expected), str(2**21)]


@pytest.mark.parametrize("options", [{"top_k": 20}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.9}], ids=str)
def test_masks_come_out_of_graphs_and_the_learner_gives_the_samplers_log_probs(options: dict[str, float]) -> None:
    policy = model(Precision.BF16)
    engine = LocalEngine(policy, tiny_tokenizer(), eos_token_ids=[2])
    prompts = [Prompt(id=str(n), token_ids=tuple(range(5, 20 + n))) for n in range(8)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        responses = engine.generate(
            prompts,
            num_samples=4,
            options=SamplingOptions(max_new_tokens=64, **options),  # ty: ignore[invalid-argument-type]
            key=RandomKey(seed=0, purpose="test"),
        )
    assert not [each for each in said if "takes no graphs" in str(each.message)]
    for response in responses:
        assert response.sampling_mask is not None
        rows = response.sampling_mask.rows()
        assert all(not row or token in row for token, row in zip(response.token_ids, rows, strict=True))
    with torch.no_grad():
        learned = policy.response_logprobs(pack_members(responses, range(len(responses)), device=DEVICE)).logprobs
    difference = learned.cpu() - torch.cat([each.logprobs for each in responses])
    assert difference.abs().mean() < 0.02


@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.BF16])
def test_compiled_layers_compute_what_the_layers_compute(precision: Precision) -> None:
    """Two passes, and then the backward pass of each."""
    results = []
    for is_compiled in (False, True):
        policy = model(precision)
        if is_compiled:
            policy.compile("inductor")
        policy.model.train()
        losses = []
        for count in (3, 5):
            texts = [tuple(range(10, 20 + row)) for row in range(count)]
            batch = pack_responses([(5, 6, 7 + row) for row in range(count)], texts, device=DEVICE)
            losses.append(-policy.response_logprobs(batch).logprobs.mean())
        for loss in losses:
            loss.backward()
        results.append([torch.stack(losses).detach(), *(each.grad for _, each in policy.trainable_parameters())])
    bound = 1e-4 if precision is Precision.FLOAT32 else 0.15  # of bf16, which is itself 0.045 from float32 here
    for plain, compiled in zip(*results, strict=True):
        assert (plain is None) == (compiled is None)
        assert plain is None or (compiled - plain).norm() <= bound * plain.norm()
