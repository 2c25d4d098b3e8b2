"""Freezes the lower layers of a model. Adapters freeze the whole base: see lora.py."""

from typing import TYPE_CHECKING

from torch import nn

from proximo.errors import ModelError

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel


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
