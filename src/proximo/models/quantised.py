"""Frozen bases with matrices in 8 or 4 bits, through bitsandbytes and transformers.

4 bits: NormalFloat with double quantisation (QLoRA, arXiv:2305.14314). 8 bits: LLM.int8 (arXiv:2208.07339) with a scale
for each row and column, but without its 16-bit outlier columns: they are chosen from the whole batch, so the results of
a sequence would depend on the others in the batch. Embeddings, norms and heads stay float32.
"""

import importlib.util
import logging
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from proximo.errors import MissingExtraError, ModelError
from proximo.models.precision.placement import Precision

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel

FLAGS = ("is_quantized", "quantization_method", "is_loaded_in_8bit", "is_loaded_in_4bit")
"""Attributes that transformers sets on a quantised model. peft reads them to choose its layers."""


class Quantisation(StrEnum):
    """Storage of the matrices of a base."""

    INT8 = "8bit"
    """Matrices and products in 8 bits. Products round more than float32 does, so bf16 precision is required."""
    NF4 = "4bit"
    """Matrices in 4 bits, dequantised for each product, which has the precision of the run."""


def loading_options(kind: Quantisation, device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained`. Raises MissingExtraError without bitsandbytes, ModelError on Apple's devices."""
    from transformers import BitsAndBytesConfig

    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtraError(
            f"quantisation {kind} needs bitsandbytes, which is not installed: pip install 'proximo[low-memory]'"
        )
    if device.type == "mps":
        raise ModelError(
            f"bitsandbytes has no kernels for mps: leave quantisation {kind} out, or choose another device"
        )
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it logs a cast at every product
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
    """The quantisation of a base; None if it is not quantised."""
    if not is_quantised(model):
        return None
    return Quantisation.NF4 if getattr(model, "is_loaded_in_4bit", False) else Quantisation.INT8


def settle_products(model: "PreTrainedModel", precision: Precision) -> None:
    """Let 4-bit modules compute in `precision`, and keep their products differentiable.

    On CPUs with AVX512-BF16, bitsandbytes converts weights in eval mode to a layout whose product has no backward pass.
    The conversion is permanent, so after a rollout no gradient would reach the layers below. It is switched off.
    """
    dtype = torch.bfloat16 if precision.is_half else torch.float32
    for module in quantised_layers(model):
        if "compute_dtype" in vars(module):
            module.compute_dtype = dtype
            module.support_avx512bf16_for_cpu = False


def carry_flags(source: nn.Module, target: nn.Module) -> None:
    """Copy the quantisation flags of `source` to `target`, which has the same layers."""
    for name in FLAGS:
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))


def quantised_layers(model: nn.Module) -> Iterator[Any]:
    """The linear layers with quantised weights."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.is_floating_point():
            yield module


def beside_weights(model: nn.Module) -> list[object]:
    """State of bitsandbytes outside of the parameters: scales, and for 8 bits the matrix itself."""
    states = [vars(module).get(name) for module in quantised_layers(model) for name in ("quant_state", "state")]
    return [state for state in states if state is not None]
