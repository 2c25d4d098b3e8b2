"""What a resumed run must find as it was: data, tokenizer, and the models that no checkpoint holds."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from proximo.models.identity import model_digest, tokenizer_digest
from proximo.trainers.rows import SplitRows


def inputs_fingerprint(
    rows: SplitRows, tokenizer: PreTrainedTokenizerBase, models: Mapping[str, nn.Module]
) -> dict[str, Any]:
    """Digests by name; the models as they are built, before a checkpoint is restored into them."""
    digests = {name: model_digest(model) for name, model in models.items()}
    return {"data": rows.fingerprints, "tokenizer": tokenizer_digest(tokenizer), "models": digests}
