"""LoRA adapters through peft: adds, loads and merges them. The base is frozen; the output layer gets no adapter."""

import copy
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from torch import nn

from proximo.errors import ModelError
from proximo.models.adapted import is_adapted
from proximo.models.pretrained.damage import misspelt_key
from proximo.models.pretrained.randomness import own_randomness
from proximo.models.pretrained.sources import why_unread
from proximo.models.quantised import is_quantised
from proximo.system_errors import memory_ran_out

if TYPE_CHECKING:  # transformers takes seconds to import
    from peft import PeftModel
    from transformers import PreTrainedModel

ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""Files of adapter weights. peft would search the Hub if a folder had neither."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoRAOptions:
    """W + alpha / rank * B A on chosen linear layers (arXiv:2106.09685). B is 0 at first, so training
    starts from the base."""

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] | None = None
    """Last parts of module names, such as `q_proj`; None = every linear layer but the output layer, and in a mixture
    of experts those of attention alone."""
    seed: int = 0
    """Seed of the random initialisation of A."""


def add_adapter(model: "PreTrainedModel", options: LoRAOptions) -> "PeftModel":
    """Put adapters into `model` (in place) and freeze the rest, except for a scalar head, which trains in full.

    Raises ModelError where a target does not exist, or is the output layer or an embedding.
    """
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers.pytorch_utils import Conv1D

    scalar = model.get_output_embeddings() is None
    targets = _linear_layers(model) if options.target_modules is None else list(options.target_modules)
    _refuse_targets(model, targets)
    scale: Any = options.alpha  # peft divides it by the rank and takes any number
    config = LoraConfig(
        task_type=TaskType.SEQ_CLS if scalar else TaskType.CAUSAL_LM,
        r=options.rank,
        lora_alpha=scale,
        lora_dropout=options.dropout,
        target_modules=targets,
        modules_to_save=["score"] if scalar else None,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    with own_randomness(model.device, seed=options.seed), _quiet_peft():
        adapted = get_peft_model(model, config)
    assert is_adapted(adapted)
    return adapted


def load_adapter(model: "PreTrainedModel", folder: Path) -> "PeftModel":
    """Put the adapters that `PeftModel.save_pretrained` wrote to `folder` into `model`, ready to train further.

    Raises ModelError if the adapter is missing, unreadable or does not fit the model.
    """
    from peft import LoraConfig, PeftModel

    if not (folder / "adapter_config.json").is_file():
        raise ModelError(f"{folder} holds no adapter: there is no adapter_config.json in it")
    if not any((folder / name).is_file() for name in ADAPTER_WEIGHTS):
        raise ModelError(f"the adapter in {folder} has no weights: there is no {ADAPTER_WEIGHTS[0]} in it")
    problem = misspelt_key(folder / "adapter_config.json", {field.name for field in fields(LoraConfig)})
    if problem:
        raise ModelError(problem)
    try:
        with _quiet_peft():
            adapted = PeftModel.from_pretrained(model, str(folder), is_trainable=True)
    except Exception as error:  # peft, safetensors and torch raise different types
        if memory_ran_out(error):
            raise
        raise ModelError(
            f"the adapter in {folder} cannot be read: {why_unread(str(folder), error, weights=True)}"
        ) from error
    _refuse_missing(adapted, folder / ADAPTER_WEIGHTS[0])
    return adapted


def _refuse_missing(adapted: "PeftModel", file: Path) -> None:
    """Raises ModelError for missing tensors, which peft would leave at their initial values. Skips pickle files."""
    from peft import get_peft_model_state_dict

    if not file.is_file():
        return
    with safe_open(file, framework="pt") as saved:
        missing = sorted(get_peft_model_state_dict(adapted, save_embedding_layers=False).keys() - set(saved.keys()))
    if missing:
        raise ModelError(
            f"{file} lacks {len(missing)} of the adapter's tensors, such as {missing[0]}: it is damaged, or of another "
            "model than its adapter_config.json says"
        )


def merged_copy(model: "PeftModel") -> "PreTrainedModel":
    """A plain transformers model with the adapters added into its weights. The training model keeps its bits.

    Raises ModelError above a quantised base, whose few bits cannot hold the sum.
    """
    from transformers import PreTrainedModel

    if is_quantised(model.get_base_model()):
        raise ModelError(
            "an adapter is not merged into a quantised base, whose few bits cannot hold the sum: a value model goes on "
            "the policy's base with an adapter (value_on_base), and `proximo export --merge` takes the whole weights"
        )
    merged = copy.deepcopy(model).merge_and_unload()
    assert isinstance(merged, PreTrainedModel)
    return merged


@contextmanager
def _quiet_peft() -> Generator[None]:
    """Silences a deprecation warning of transformers, and one about missing keys, which `_refuse_missing` refuses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        warnings.filterwarnings("ignore", message="Found missing adapter keys", category=UserWarning)
        yield


def _linear_layers(model: "PreTrainedModel") -> list[str]:
    """Last parts of the names of all linear layers below the head.

    In a mixture of experts these are the layers of attention only: stacked experts are not linear layers, and peft
    would rename modules that look like them.
    """
    from transformers.pytorch_utils import Conv1D

    has_experts = any(parameter.dim() == 3 for parameter in model.parameters())
    names = {
        name.rpartition(".")[2]
        for name, module in model.base_model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and (not has_experts or "attn" in name or "attention" in name)
    }
    return sorted(names)


def _refuse_targets(model: "PreTrainedModel", targets: list[str]) -> None:
    """Raises ModelError for bad targets, which peft would report late or not at all."""
    from transformers.pytorch_utils import Conv1D

    plain = {id(layer) for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer is not None}
    names = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D | nn.Embedding)
    }
    for target in targets:
        hits = [module for name, module in names.items() if name == target or name.endswith(f".{target}")]
        if not hits:
            known = sorted({name.rpartition(".")[2] for name in names})
            raise ModelError(
                f"lora target {target!r} is no linear layer of this {model.config.model_type} model; "
                f"its layers are {', '.join(known)}"
            )
        if any(id(module) in plain for module in hits):
            raise ModelError(
                f"lora target {target!r} is the output layer or the embedding, which the fused head reads directly; "
                "leave it out"
            )
