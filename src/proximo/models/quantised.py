"""Bases whose matrices are stored in 8 or 4 bits, by bitsandbytes through transformers. Never trained themselves.

4 bits: NormalFloat with double quantisation (QLoRA, arXiv:2305.14314). 8 bits: LLM.int8 (arXiv:2208.07339) with a scale
for each row and column, and without its second part, columns with outliers in 16 bits: which columns those are is asked
of the whole batch, so a sequence would depend on its company. Embeddings, norms and heads stay float32.
"""

import importlib.util
import logging
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from proximo.errors import MissingExtraError, ModelError
from proximo.models.precision.placement import Precision

FLAGS = ("is_quantized", "quantization_method", "is_loaded_in_8bit", "is_loaded_in_4bit")
"""What transformers notes on a model, and peft reads to choose its layers."""


class Quantisation(StrEnum):
    """In how many bits the matrices of a base are stored."""

    INT8 = "8bit"
    """Products in 8 bits too: their rounding exceeds that of float32, so it goes with bf16 alone."""
    NF4 = "4bit"
    """Products in the run's precision, with matrices that are expanded for each."""


def loading_options(kind: Quantisation, device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained`. Raises MissingExtraError without bitsandbytes, ModelError on Apple's devices."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtraError(
            f"quantisation {kind} needs bitsandbytes, which is not installed: pip install 'proximo[low-memory]'"
        )
    if device.type == "mps":
        raise ModelError(
            f"bitsandbytes has no kernels for mps: leave quantisation {kind} out, or choose another device"
        )
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells at every product that it casts
    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    if kind is Quantisation.NF4:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
    return {"quantization_config": config, "device_map": {"": str(device)}}


def is_quantised(model: nn.Module) -> bool:
    """True for a base that was loaded in 8 or 4 bits."""
    return bool(getattr(model, "is_quantized", False))


def quantisation_of(model: nn.Module) -> Quantisation | None:
    """None for a base of whole weights."""
    if not is_quantised(model):
        return None
    return Quantisation.NF4 if getattr(model, "is_loaded_in_4bit", False) else Quantisation.INT8


def settle_products(model: PreTrainedModel, precision: Precision) -> None:
    """Products of 4-bit matrices in `precision`, by the one way that has a gradient.

    In eval mode bitsandbytes rewrites the weights of some CPUs (AVX512-BF16) into a layout whose product has no
    backward pass, for good: a rollout would cut every gradient below. That is switched off.
    """
    dtype = torch.bfloat16 if precision.is_half else torch.float32
    for module in quantised_layers(model):
        if "compute_dtype" in vars(module):
            module.compute_dtype = dtype
            module.support_avx512bf16_for_cpu = False


def carry_flags(source: nn.Module, target: nn.Module) -> None:
    """Note on `target`, which has the layers of `source`, how they are stored."""
    for name in FLAGS:
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))


def quantised_layers(model: nn.Module) -> Iterator[Any]:
    """The linear layers whose weights are stored in few bits."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.is_floating_point():
            yield module


def beside_weights(model: nn.Module) -> list[object]:
    """What bitsandbytes keeps of a quantised matrix outside its parameter: scales, and in 8 bits the matrix itself."""
    kept = [vars(module).get(name) for module in quantised_layers(model) for name in ("quant_state", "state")]
    return [each for each in kept if each is not None]
