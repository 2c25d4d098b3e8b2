"""A transformers model before Proximo runs it: its adapter, its layers, their dropout, and its context length.

And calls of transformers without side effects on torch's random state or on the terminal.
Imports neither transformers nor peft.
"""

import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from proximo.errors import ConfigError, ModelError

if TYPE_CHECKING:  # transformers takes seconds to import
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel
    from typing_extensions import TypeIs


def is_adapted(model: object) -> "TypeIs[PeftModel]":
    """True for a model of peft. There is none before peft was imported."""
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)
    return kind is not None and isinstance(model, kind)


def base_of(model: "PreTrainedModel | PeftModel") -> "PreTrainedModel":
    """The transformers model, below an adapter if there is one. Raises ModelError for any other object."""
    from transformers import PreTrainedModel

    base = model.get_base_model() if is_adapted(model) else model
    if not isinstance(base, PreTrainedModel):
        raise ModelError(
            f"expected a transformers model, got {type(model).__name__}: load it, for example with "
            "AutoModelForCausalLM.from_pretrained(path, dtype='float32')"
        )
    return base


def freeze_layers(base: "PreTrainedModel", count: int) -> None:
    """Freeze the embeddings and the first `count` layers; with 0, nothing.

    Embeddings that are tied to the output layer stay trainable. Raises ModelError if the model has fewer layers, or if
    its layers cannot be identified.
    """
    if count == 0:
        return
    layers = decoder_layers(base)
    if count > len(layers):
        raise ModelError(f"frozen_layers is {count}, but the {base.config.model_type} model has {len(layers)} layers")
    for layer in layers[:count]:
        layer.requires_grad_(False)
    embeddings, output = base.get_input_embeddings(), base.get_output_embeddings()
    if output is None or output.weight is not embeddings.weight:
        embeddings.requires_grad_(False)


def decoder_layers(base: "PreTrainedModel") -> nn.ModuleList:
    """The layers of a model, lowest first. Raises ModelError if they cannot be identified."""
    depth = base.config.get_text_config().num_hidden_layers
    stacks = [module for module in base.modules() if isinstance(module, nn.ModuleList) and len(module) == depth]
    if not stacks:
        raise ModelError(
            f"the layers of a {base.config.model_type} model are not known: leave frozen_layers out, and replicate the "
            "model on ranks"
        )
    return stacks[0]


PROBABILITY_WORDS = ("drop", "jitter")
"""Parts of the names of such settings. For example, Mixtral's router has random `jitter_noise`."""
_PHIMOE = "Phimoe"
"""Prefix of the class names of PhiMoE. Its `router_jitter_noise` is not a probability: also in evaluation, it sets how
close to the best expert other experts must be to be used."""
_PHIMOE_ROUTER = "PhimoeTopKRouter"
"""Draws experts at random in training."""


def disable_dropout(model: "PreTrainedModel | PeftModel") -> int:
    """Set every dropout probability and router jitter to 0, in modules (LoRA's too) and configurations.

    Routers of PhiMoE, which draw experts in training, choose them as in evaluation.

    Returns the number of settings that were not 0 before.
    """
    from transformers import PreTrainedModel

    changed = 0
    configs: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            configs[id(module.config)] = module.config
        if isinstance(module, nn.modules.dropout._DropoutNd):
            changed += module.p != 0
            module.p = 0.0
        if type(module).__name__ == _PHIMOE_ROUTER and _evaluate_router not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_evaluate_router)
        changed += _zero_probabilities(vars(module), module)
    for config in configs.values():
        changed += _zero_probabilities(config.to_dict(), config)
    return changed


def _evaluate_router(router: nn.Module, _inputs: tuple) -> None:
    router.training = False


def _zero_probabilities(values: dict, owner: "nn.Module | PreTrainedConfig") -> int:
    """Set attributes of `owner` with such names to 0. Returns the number of changed ones."""
    kept = ("router_jitter_noise",) if type(owner).__name__.startswith(_PHIMOE) else ()
    nonzero = [
        name
        for name, value in values.items()
        if any(word in name.lower() for word in PROBABILITY_WORDS)
        and isinstance(value, float)
        and value != 0
        and name not in kept
    ]
    for name in nonzero:
        setattr(owner, name, 0.0)
    return len(nonzero)


LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""RoPE types whose frequencies depend on the longest sequence of a pass, so packed sequences would affect each
other."""


def position_limit(config: "PreTrainedConfig") -> int | None:
    """Tokens that one sequence may have; None for a model without a stated limit.

    For RoPE types in `LENGTH_DEPENDENT_ROPE`, the limit is the length up to which their frequencies are constant.
    """
    text = config.get_text_config().to_dict()
    stated = text.get("max_position_embeddings") or text.get("n_positions") or text.get("max_seq_len")
    limits = [stated] if stated else []
    for rope in _rope_settings(text.get("rope_parameters")):
        if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            limits.append(rope.get("original_max_position_embeddings") or stated)
    return min((limit for limit in limits if limit), default=None)


def check_lengths(
    config: "PreTrainedConfig", *, role: str, max_prompt_tokens: int, max_response_tokens: int, section: str = "data"
) -> None:
    """Raises ConfigError if prompt and response together can exceed the context length of the role's model.

    Without responses (`max_response_tokens` 0) the prompts are whole examples of the recipe's `section`. Those of the
    section `environment` are episodes.
    """
    limit = position_limit(config)
    total = max_prompt_tokens + max_response_tokens
    if limit is None or total <= limit:
        return
    kinds = {
        rope.get("rope_type") for rope in _rope_settings(config.get_text_config().to_dict().get("rope_parameters"))
    }
    scheme = kinds & set(LENGTH_DEPENDENT_ROPE)
    reason = f" (beyond it, its {scheme.pop()} rotary positions depend on the longest sequence)" if scheme else ""
    reads = f"but the {role} model ({config.model_type}) reads at most {limit} positions{reason}"
    if section == "environment":
        python = "in Python max_tokens of PythonEnvironment or PythonAgent"
        raise ConfigError(f"an episode has up to {total} tokens, {reads}; lower environment.max_tokens, {python}")
    if not max_response_tokens:
        raise ConfigError(f"there are examples of up to {total} tokens, {reads}; lower {section}.max_tokens")
    raise ConfigError(
        f"a prompt of up to {max_prompt_tokens} tokens and a response of up to {max_response_tokens} make {total}, "
        f"{reads}; lower data.max_prompt_tokens or ppo.rollout.max_new_tokens"
    )


def _rope_settings(parameters: Any) -> Iterator[dict[str, Any]]:
    """The RoPE settings of a config. Some models have one, others one per type of layer."""
    if not isinstance(parameters, dict):
        return
    if "rope_type" in parameters:
        yield parameters
    for nested in parameters.values():
        yield from _rope_settings(nested)


@contextmanager
def own_randomness(device: torch.device, *, seed: int = 0) -> Generator[None]:
    """Seed the global generators of the CPU and `device` inside; restore their state afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Disable progress bars, warnings and load reports inside; restore the settings afterwards."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
