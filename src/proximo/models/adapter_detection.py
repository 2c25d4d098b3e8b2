"""Recognises a model with an adapter without importing peft. Only lora.py, which adds and loads them, imports it."""

import sys
from typing import TYPE_CHECKING

from proximo.errors import ModelError

if TYPE_CHECKING:  # transformers and peft take seconds to import
    from peft import PeftModel
    from transformers import PreTrainedModel
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
