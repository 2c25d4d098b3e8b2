"""Disables dropout and random routing, so that train-mode passes are deterministic. Checkpointing needs train mode.

Passes without gradients run in eval mode.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:  # transformers takes seconds to import
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel

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


@contextmanager
def evaluating(module: nn.Module) -> Generator[None]:
    """Put all submodules into eval mode inside; restore the mode of each one afterwards."""
    before = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, training in before:
            submodule.training = training
