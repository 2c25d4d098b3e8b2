"""What a resumed run must find as it was: data, tokenizer, and the models that no checkpoint holds."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from proximo.config.functions import source_digest
from proximo.config.schema.base import Section
from proximo.models.pretrained.digests import model_digest, tokenizer_digest
from proximo.run.build.data import SplitRows
from proximo.run.preflight import inputs_of


def inputs_fingerprint(
    rows: SplitRows, tokenizer: PreTrainedTokenizerBase, models: Mapping[str, nn.Module]
) -> dict[str, Any]:
    """Digests by name; the models as they are built, before a checkpoint is restored into them."""
    digests = {name: model_digest(model) for name, model in models.items()}
    return {"data": rows.fingerprints, "tokenizer": tokenizer_digest(tokenizer), "models": digests}


def function_sources(recipe: Section) -> dict[str, str | None]:
    """Of each reward function and judge of the user's own a hash of the file that it stands in.

    What that file imports is not looked at, nor are functions whose rows are hashed, or that score nothing.
    """
    scoring = [each for each in inputs_of(recipe) if each.key.startswith(("reward.", "gold.")) and ":" in each.name]
    names = sorted({each.name for each in scoring if each.kind in ("function", "judge")})
    return {name: source_digest(name) for name in names if not name.startswith("proximo.")}
