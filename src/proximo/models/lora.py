"""LoRA adapters through peft: adds, loads and merges them. The base is frozen; the output layer gets no adapter."""

import copy
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn

from proximo.distributed.unread_parameters import numbers_of, read_all
from proximo.errors import ModelError, memory_ran_out
from proximo.models.pretrained.folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS, misspelt_key, read_adapter_config
from proximo.models.pretrained.sources import first_part, why_unread
from proximo.models.pretrained.vocabulary import embedding_rows, resize_vocabulary, settle_tying, vocabulary_layers
from proximo.models.quantised import is_quantised
from proximo.models.transformers_model import base_of, is_adapted, own_randomness

if TYPE_CHECKING:  # transformers takes seconds to import
    from peft import PeftModel
    from transformers import PreTrainedModel

BASE_PREFIX = "base_model.model."
"""Prefix that peft gives the names of the base's tensors in a file."""
BELOW_WRAPPERS = ("", ".base_layer", ".token_adapter.base_layer")
"""Names of a layer's own matrix in the file: plain, below LoRA, below single tokens that train."""

SETTLED_WARNINGS = (
    "Found missing adapter keys",
    "Model (has|with) `tie_word_embeddings=True`",
    "Input and output embeddings are no longer tied after merging",
    "You have requested `ensure_weight_tying`, but no tied modules were found",
    "`lora_bias=True` was passed but the targeted layer",
    "Adapter 'default': [0-9]+ LoRA tensor",
)
"""Beginnings of peft's warnings that are silenced, because this file handles them: missing keys are refused, tied
matrices are separated where necessary, two matrices stay two, and an impossible merge is refused. The warning on
shapes is about saving the biases of adapters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoRAOptions:
    """W + alpha / rank * B A on chosen linear layers (arXiv:2106.09685). B is 0 at first, so training
    starts from the base."""

    rank: int = 16
    alpha: float = 32.0
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

    The vocabulary of `model` gets the rows that the adapter was trained with, in place. Raises ModelError if the
    adapter is missing, unreadable, of a kind that is not merged, or does not fit the model.
    """
    from peft import LoraConfig, PeftModel

    if not (folder / ADAPTER_CONFIG).is_file():
        raise ModelError(f"{folder} holds no adapter: there is no {ADAPTER_CONFIG} in it")
    if not any((folder / name).is_file() for name in ADAPTER_WEIGHTS):
        raise ModelError(f"the adapter in {folder} has no weights: there is no {ADAPTER_WEIGHTS[0]} in it")
    problem = misspelt_key(folder / ADAPTER_CONFIG, {field.name for field in fields(LoraConfig)})
    if problem:
        raise ModelError(problem)
    saved = read_adapter_config(folder)
    try:
        _fit_vocabulary(model, folder, saved)
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
    with safe_open(file, framework="pt") as saved, _quiet_peft():
        missing = sorted(get_peft_model_state_dict(adapted, save_embedding_layers=False).keys() - set(saved.keys()))
    if missing:
        raise ModelError(
            f"{file} lacks {len(missing)} of the adapter's tensors, such as {missing[0]}: it is damaged, or of another "
            "model than its adapter_config.json says"
        )


def brings_other_vocabulary(model: "PreTrainedModel", folder: Path) -> bool:
    """Whether the file of an adapter holds an embedding or output layer that is not that of `model`."""
    with _saved_vocabulary(model, folder) as saved:
        return any(
            list(saved_layer.get_shape()) != list(layer.weight.shape)
            or not torch.equal(saved_layer[:].to(layer.weight), numbers_of(layer.weight))
            for layer, saved_layer in saved
        )


@contextmanager
def _saved_vocabulary(model: "PreTrainedModel", folder: Path) -> Generator[list[tuple[Any, Any]]]:
    """Vocabulary layers of `model`, each with the unread matrix of that name in an adapter's file."""
    file = folder / ADAPTER_WEIGHTS[0]
    if not file.is_file():
        yield []
        return
    layers = vocabulary_layers(model)
    names = {
        f"{BASE_PREFIX}{name}{part}.weight": each
        for name, each in model.named_modules()
        if each in layers
        for part in BELOW_WRAPPERS
    }
    with safe_open(file, framework="pt") as saved:
        yield [(names[name], saved.get_slice(name)) for name in names.keys() & set(saved.keys())]


def _fit_vocabulary(model: "PreTrainedModel", folder: Path, saved: dict[str, Any]) -> None:
    """Give `model` the vocabulary rows that the adapter in `folder` adds or changes."""
    indices = saved.get("trainable_token_indices") or ()
    lists = indices.values() if isinstance(indices, dict) else [indices]
    resize_vocabulary(model, 1 + max((index for each in lists for index in each), default=-1))
    with _saved_vocabulary(model, folder) as layers:
        rows = {saved_layer.get_shape()[0] for _, saved_layer in layers}
        for layer, _ in layers:
            read_all(layer)  # peft copies into it
    for num_rows in rows:
        resize_vocabulary(model, num_rows)
        if num_rows < embedding_rows(model):
            model.resize_token_embeddings(num_rows)


def is_on_layers_alone(adapted: "PeftModel") -> bool:
    """True for an adapter that neither wraps embedding or output layer nor replaces a layer except a scalar head.

    Only such an adapter runs unmerged; others have to be merged.
    """
    from peft.utils.other import AuxiliaryTrainingWrapper

    base = base_of(adapted)
    replaced = {name for name, module in base.named_modules() if isinstance(module, AuxiliaryTrainingWrapper)}
    layers = (base.get_input_embeddings(), base.get_output_embeddings())
    return replaced <= {"score"} and all(isinstance(each, nn.Embedding | nn.Linear | None) for each in layers)


@torch.no_grad()
def merge(adapted: "PeftModel") -> "PreTrainedModel":
    """Add the adapters into the weights of their base, in place. Returns the base; all its tensors train.

    Embedding and output layer become two matrices if the adapter made them differ. Raises ModelError if peft cannot
    merge, and for a quantised base, whose few bits cannot hold the sum.
    """
    from transformers import PreTrainedModel

    _refuse_quantised(adapted)
    base = base_of(adapted)
    if not is_on_layers_alone(adapted):
        _untie(base)
    try:
        with _quiet_peft():
            merged = adapted.merge_and_unload()
    except Exception as error:  # each kind of LoRA refuses in its own way
        if memory_ran_out(error):
            raise
        raise ModelError(f"the adapter cannot be merged into its base: {first_part(error)}") from error
    assert isinstance(merged, PreTrainedModel), "its base is one"
    layers = vocabulary_layers(merged)
    if len(layers) == 2 and torch.equal(*(layer.weight for layer in layers)):
        layers[1].weight = layers[0].weight
    settle_tying(merged)
    return merged.requires_grad_(True)


def _untie(base: "PreTrainedModel") -> None:
    """Untie the output layer below an adapter: peft would add the change of one matrix to both layers."""
    pair = [
        next(module for module in layer.modules() if isinstance(module, nn.Embedding | nn.Linear))
        for layer in (base.get_input_embeddings(), base.get_output_embeddings())
        if layer is not None
    ]
    if len(pair) == 2 and pair[0].weight is pair[1].weight:
        pair[1].weight = nn.Parameter(pair[1].weight.clone())


def merged_copy(model: "PeftModel") -> "PreTrainedModel":
    """A plain transformers model with the adapters added into its weights. The training model keeps its bits.

    Raises ModelError as `merge` does.
    """
    _refuse_quantised(model)
    return merge(copy.deepcopy(model))


def _refuse_quantised(model: "PeftModel") -> None:
    if is_quantised(model.get_base_model()):
        raise ModelError(
            "an adapter is not merged into a quantised base, whose few bits cannot hold the sum: a value model goes on "
            "the policy's base with an adapter (value_on_base), and `proximo export --merge` takes the whole weights"
        )


@contextmanager
def _quiet_peft() -> Generator[None]:
    """Silences only those warnings of peft that this file handles."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        for message in SETTLED_WARNINGS:
            warnings.filterwarnings("ignore", message=message, category=UserWarning)
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
                f"lora target {target!r} is not a linear layer of this {model.config.model_type} model; "
                f"its layers are {', '.join(known)}"
            )
        if any(id(module) in plain for module in hits):
            raise ModelError(
                f"lora target {target!r} is the output layer or the embedding, which the fused head reads directly; "
                "leave it out"
            )
