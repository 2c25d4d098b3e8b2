"""Switching off everything that makes two train-mode passes differ. Not eval mode: checkpointing needs train mode."""

from peft import PeftModel
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

PROBABILITY_WORDS = ("drop", "jitter")
"""What the names of such probabilities contain: Mixtral's router, for one, multiplies its input by `jitter_noise`."""


def disable_dropout(model: PreTrainedModel | PeftModel) -> int:
    """Set every dropout probability and router jitter to 0, in modules (LoRA's too) and configurations.

    Returns how many places were not 0 before.
    """
    changed = 0
    configs: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            configs[id(module.config)] = module.config
        if isinstance(module, nn.modules.dropout._DropoutNd):
            changed += module.p != 0
            module.p = 0.0
        changed += _zero_probabilities(vars(module), module)
    for config in configs.values():
        changed += _zero_probabilities(config.to_dict(), config)
    return changed


def _zero_probabilities(values: dict, owner: nn.Module | PreTrainedConfig) -> int:
    """Numbers under such a name that the owner keeps as plain attributes."""
    found = [
        name
        for name, value in values.items()
        if any(word in name.lower() for word in PROBABILITY_WORDS) and isinstance(value, float) and value != 0
    ]
    for name in found:
        setattr(owner, name, 0.0)
    return len(found)
