"""Devices, precisions and position limits by name."""

import os

import pytest
import torch

from architectures import ARCHITECTURES, LLAMA_LIKE, build_architecture
from builders import tiny_language_model
from proximo.config.run import RunConfig
from proximo.errors import ConfigError, TrainingError
from proximo.models.precision.placement import (
    Precision,
    resolve_device,
    resolve_precision,
    say_precision,
    use_deterministic_kernels,
    use_tf32,
    without_tf32,
)
from proximo.models.pretrained.sources import new_config
from proximo.models.transformers_model import check_lengths, position_limit
from proximo.run.make.models import prepare_device
from proximo.run.memory import memory_advice


def test_precisions_by_name():
    names = {"float32": Precision.FLOAT32, "bf16": Precision.BF16, "bfloat16": Precision.BF16}
    assert {name: resolve_precision(name) for name in names} == names
    assert resolve_precision("bf16", float32_head=True) is Precision.BF16_FLOAT32_HEAD
    assert resolve_precision("float32", float32_head=True) is Precision.FLOAT32
    with pytest.raises(ConfigError, match="fp16 is not offered: its largest number is 65504"):
        resolve_precision("fp16")
    with pytest.raises(ConfigError, match="must be auto, float32, tf32 or bf16, not 'int8'"):
        resolve_precision("int8")


def test_auto_is_bf16_where_cuda_has_it(monkeypatch: pytest.MonkeyPatch):
    assert resolve_precision("auto", device="cpu") is resolve_precision("auto", device="mps") is Precision.FLOAT32
    assert resolve_precision("auto", device="cuda") is Precision.BF16  # of a plan for another machine
    pretend(monkeypatch, cuda=1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    assert resolve_precision("auto", device="cuda:0") is Precision.BF16
    assert "bf16, because run.precision is auto" in str(say_precision("auto", "cuda:0"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    assert resolve_precision("auto", device="cuda:0") is Precision.FLOAT32
    assert "cuda:0 has no bf16" in str(say_precision("auto", "cuda:0"))
    assert "float32, because run.precision is auto and the device is cpu" in str(say_precision("auto", "cpu"))
    assert say_precision("bf16", "cpu") is None


def test_tf32_is_a_mode_of_cuda():
    with pytest.raises(ConfigError, match="tf32 is for CUDA devices, and the device is cpu: use float32 or auto"):
        resolve_precision("tf32", device="cpu")
    assert not Precision.TF32.is_half
    with without_tf32():  # which puts back what was there
        use_tf32(Precision.FLOAT32)
        assert not torch.backends.cuda.matmul.allow_tf32
        use_tf32(resolve_precision("tf32", device="cuda:0"))
        assert torch.backends.cuda.matmul.allow_tf32
        use_tf32(Precision.FLOAT32)  # the next stage of a pipeline, in the same process
        assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield torch.are_deterministic_algorithms_enabled
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def test_kernels_are_deterministic_on_cuda_until_a_run_wants_others(kernels) -> None:
    use_deterministic_kernels(True, torch.device("cpu"))
    assert not kernels()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    use_deterministic_kernels(True, torch.device("cuda:0"))
    assert kernels()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.utils.deterministic.fill_uninitialized_memory
    use_deterministic_kernels(True, torch.device("cpu"))  # another stage, whose kernels are not CUDA's
    assert kernels()
    use_deterministic_kernels(False, torch.device("cuda:0"))
    assert not kernels()


def test_a_run_says_so_to_its_device(kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proximo.run.make.models.resolve_device", lambda _: torch.device("cuda:0"))
    for wanted in (True, False):
        prepare_device(RunConfig(folder="run", device="cuda", deterministic=wanted))
        assert kernels() is wanted


def test_an_operator_without_such_a_kernel_ends_the_run_with_its_name() -> None:
    said = "cumsum_cuda_kernel does not have a deterministic implementation, but you set 'torch.use_deterministic...'"
    with (
        pytest.raises(TrainingError, match=r"step 3: cumsum_cuda_kernel .* in score: set run.deterministic to false"),
        memory_advice("lower x", "score", step=3),
    ):
        raise RuntimeError(said)


def pretend(monkeypatch: pytest.MonkeyPatch, *, cuda: int = 0, mps: bool = False) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


def test_auto_takes_the_fastest_device_and_one_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch):
    for cuda, mps, expected in ((0, True, "mps"), (2, True, "cuda"), (0, False, "cpu")):
        pretend(monkeypatch, cuda=cuda, mps=mps)
        assert resolve_device("auto") == torch.device(expected)
        assert resolve_device("cpu") == torch.device("cpu")
    for name in ("cuda", "mps"):
        with pytest.raises(ConfigError, match=f"device {name} was asked for, but this machine has none"):
            resolve_device(name)
    with pytest.raises(ConfigError, match="device must be auto, cpu, cuda, cuda:N or mps, not 'gpu'"):
        resolve_device("gpu")
    pretend(monkeypatch, cuda=2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="there are 2 CUDA devices"):
        resolve_device("cuda:2")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_states_how_many_positions_it_reads(architecture: str):
    assert position_limit(build_architecture(architecture).config) == 128


LONG = {"rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 10000.0}, 128),
        ({**LONG, "rope_type": "yarn", "original_max_position_embeddings": 32}, 128),
        ({**LONG, "rope_type": "linear"}, 128),
        ({**LONG, "rope_type": "dynamic"}, 128),
        ({**LONG, "rope_type": "dynamic", "original_max_position_embeddings": 32}, 32),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 32,
            },
            32,
        ),
    ],
)
def test_positions_that_depend_on_the_longest_sequence_are_allowed_only_where_they_do_not(rope: dict, expected: int):
    options = {**LLAMA_LIKE, "head_dim": 8, "model_type": "llama", "rope_parameters": rope}
    assert position_limit(new_config(options)) == expected


def test_positions_given_per_kind_of_layer_are_all_looked_at():
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    dynamic = {**LONG, "rope_type": "dynamic", "original_max_position_embeddings": 32}
    config = build_architecture("gemma3").config
    config.rope_parameters = {"full_attention": dynamic, "sliding_attention": plain}
    assert position_limit(config) == 32


def test_a_prompt_and_a_response_beyond_the_positions_are_a_configuration_error():
    config = build_architecture("gpt2").config
    check_lengths(config, role="policy", max_prompt_tokens=100, max_response_tokens=28)
    with pytest.raises(
        ConfigError, match=r"100 tokens and a response of up to 29 make 129, .*policy model \(gpt2\) reads at most 128"
    ):
        check_lengths(config, role="policy", max_prompt_tokens=100, max_response_tokens=29)


def test_examples_beyond_the_positions_name_the_key_to_lower():
    config = tiny_language_model("gpt2").config
    with pytest.raises(ConfigError, match=r"examples of up to 300 tokens, but the policy model.*lower data.max_tokens"):
        check_lengths(config, role="policy", max_prompt_tokens=300, max_response_tokens=0)


def test_the_message_for_long_context_positions_says_why():
    rope = {**LONG, "rope_type": "dynamic", "original_max_position_embeddings": 32}
    config = new_config({**LLAMA_LIKE, "model_type": "llama", "rope_parameters": rope})
    with pytest.raises(ConfigError, match="its dynamic rotary positions depend on the longest sequence"):
        check_lengths(config, role="reference", max_prompt_tokens=30, max_response_tokens=30)


def test_a_model_without_a_stated_limit_reads_anything():
    config = new_config({"model_type": "bloom", "vocab_size": 61, "hidden_size": 32, "n_layer": 1, "n_head": 4})
    assert position_limit(config) is None
    check_lengths(config, role="policy", max_prompt_tokens=10**6, max_response_tokens=10**6)
