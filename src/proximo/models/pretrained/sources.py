"""Sources of models: reads configurations, and refuses unsupported models before any weight is read."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proximo.errors import ModelError, memory_ran_out
from proximo.hub import is_local, not_there, within_reach
from proximo.models.pretrained.folders import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    GENERATION,
    base_of_adapter,
    damage_in,
    is_adapter_folder,
    misspelt_key,
    refuse_other_inputs,
    refuse_overlooked,
)
from proximo.models.quantised import Quantisation
from proximo.models.transformers_model import quiet_transformers

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig

PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers that cache keys and values of single tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A folder or Hub name, or a configuration for a random start; exactly one of the two."""

    path: str | None = None
    revision: str | None = None
    """Revision of a Hub name."""
    config: Mapping[str, Any] | None = None
    """`model_type` and other arguments of its configuration class."""
    seed: int = 0
    """Seed of a random start."""
    quantisation: Quantisation | None = None
    """Load the matrices of a path in 8 or 4 bits; None keeps them unquantised."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.config is None):
            raise ModelError("a model comes either from a path (folder or Hub name) or from a config, exactly one")

    @property
    def name(self) -> str:
        """The name of the source in messages."""
        return self.path if self.path is not None else f"a new {(self.config or {}).get('model_type')} model"


def adapter_base(source: ModelSource) -> ModelSource | None:
    """The base model of an adapter that `source` names; None for a source without an adapter.

    Raises ModelError if the adapter does not name its base or cannot be merged into it.
    """
    folder = adapter_folder(source)
    if folder is None:
        return None
    base, revision = base_of_adapter(folder)
    return ModelSource(path=base, revision=revision)


def adapter_folder(source: ModelSource, *, with_weights: bool = False) -> Path | None:
    """The folder of the adapter that `source` names; None for a source without an adapter.

    An adapter of the Hub is fetched to the cache: its configuration, and `with_weights` its weights.
    """
    if source.path is None:
        return None
    folder = Path(source.path)
    if not is_local(source.path):
        config = hub_file(source, ADAPTER_CONFIG)
        if config is None:
            return None
        folder = config.parent
        for name in ADAPTER_WEIGHTS if with_weights else ():
            if hub_file(source, name) is not None:
                break
    return folder if is_adapter_folder(folder) else None


def adapter_or_folder(path: str, revision: str | None) -> Path:
    """The folder of the adapter with its weights; the path itself if it names no adapter."""
    return adapter_folder(ModelSource(path=path, revision=revision), with_weights=True) or Path(path)


def hub_file(source: ModelSource, name: str) -> Path | None:
    """The cached file of a model of the Hub, fetched if needed; None if it is missing or the Hub is not reachable."""
    from transformers.utils.hub import cached_file

    assert source.path is not None
    try:
        with within_reach(source.path):
            found = cached_file(
                source.path, name, revision=source.revision, _raise_exceptions_for_missing_entries=False
            )
    except OSError:  # no such model, or no way to it: who reads its configuration says so
        return None
    return None if found is None else Path(found)


def read_config(source: ModelSource) -> "PreTrainedConfig":
    """The checked configuration. Raises ModelError if it is missing, unreadable or unsupported."""
    with quiet_transformers():
        config = _saved_config(source) if source.path is not None else new_config(source.config or {})
    refuse_unsupported(config, source.name)
    return config


def new_config(options: Mapping[str, Any]) -> "PreTrainedConfig":
    """A configuration from plain values. Raises ModelError for an unknown type, key or value."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = options.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; llama is a good first choice"
        raise ModelError(f"model_type {model_type!r} is unknown to this version of transformers{hint}")
    kind = CONFIG_MAPPING[model_type]
    known = {field.name for field in fields(kind)} | set(kind.attribute_map) | {"model_type"}
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise ModelError(
                f"a {model_type} config has no key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
    try:
        return AutoConfig.for_model(**options)
    except Exception as error:  # each configuration class validates in its own way
        raise ModelError(f"this is not a valid {model_type} config: {first_part(error)}") from error


def refuse_unsupported(config: "PreTrainedConfig", name: str) -> None:
    """Raises ModelError for kinds of models that can never be packed, before their weights are read."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    refuse_other_inputs(config.to_dict(), name)
    kind, text = config.model_type, config.get_text_config()
    if config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder model ({kind}); Proximo trains causal language models only")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(f"{name} is a {kind} model, and transformers has no causal language model of this type")
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.to_dict().get("is_decoder"):
        raise ModelError(f"{name} is an encoder ({kind}): its tokens see what follows them; take a causal model")
    if config.to_dict().get("quantization_config") is not None:
        raise ModelError(f"{name} is quantised, so its weights cannot train; take the original checkpoint")
    others = set(text.to_dict().get("layer_types") or ()) - PACKABLE_LAYERS
    if others:
        raise ModelError(
            f"{name} ({kind}) has layers of the kind {', '.join(sorted(others))}, whose state runs across sequences; "
            "only models with full or sliding attention in every layer can be packed"
        )


def _saved_config(source: ModelSource) -> "PreTrainedConfig":
    from transformers import AutoConfig

    assert source.path is not None
    if is_local(source.path):
        folder = Path(source.path)
        if not folder.is_dir():
            raise ModelError(f"{not_there(source.path)}; give a model folder, or a Hub name such as owner/name")
        if not (folder / "config.json").is_file():
            raise ModelError(f"{source.path} is not a model folder: there is no config.json in it")
        refuse_overlooked(folder)
    try:
        with within_reach(source.path):
            config = AutoConfig.from_pretrained(source.path, revision=source.revision)
    except Exception as error:  # a damaged file fails in as many ways as there are configuration classes
        if memory_ran_out(error):
            raise
        raise ModelError(
            f"the configuration of {source.path} cannot be read: {why_unread(source.path, error, weights=False)}"
        ) from error
    if is_local(source.path):
        _refuse_misspelt(Path(source.path), config)
    _check_generation_settings(source.path, source.revision)
    return config


def _check_generation_settings(path: str, revision: str | None) -> None:
    """Raises ModelError for settings that make transformers refuse the weights, or that end no answer."""
    from transformers import GenerationConfig

    advice = (
        f"mend {GENERATION}, or remove it: training takes from it which tokens end an answer, and config.json and the "
        "tokenizer name them too"
    )
    try:
        with within_reach(path):
            settings = GenerationConfig.from_pretrained(path, revision=revision or "main")
    except OSError:  # a model need not have any
        return
    except Exception as error:  # each setting is checked in its own way
        if memory_ran_out(error):
            raise
        why = first_part(error).rstrip(".")
        raise ModelError(f"transformers refuses the {GENERATION} of {path}: {why}; {advice}") from error
    ends = settings.eos_token_id
    for end in ends if isinstance(ends, list) else [ends]:
        if end is not None and not isinstance(end, int):
            raise ModelError(f"eos_token_id in the {GENERATION} of {path} is {ends!r}, but must be numbers: {advice}")


def _refuse_misspelt(folder: Path, config: "PreTrainedConfig") -> None:
    from transformers import GenerationConfig

    kind = type(config)
    known = {field.name for field in fields(kind)} | set(kind.attribute_map)
    problem = misspelt_key(folder / "config.json", known) or misspelt_key(folder / GENERATION, vars(GenerationConfig()))
    if problem:
        raise ModelError(problem)


def why_unread(path: str, error: Exception, *, weights: bool) -> str:
    """The damaged file of a folder if there is one; else the library's message."""
    if not is_local(path):  # it was treated as a Hub name, and may be a mistyped folder
        return f"{first_part(error)}; {not_there(path)}"
    return damage_in(Path(path), weights=weights) or first_part(error)


def first_part(error: Exception) -> str:
    """The start of a library's message, which may be a page long, or empty."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + " ..."


_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Names of the coefficient in configurations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Balancing:
    """How a model is balanced."""

    coefficient: float
    """Of the loss, above 0."""
    experts_per_token: int
    """k: the experts that read a token."""


def balancing_of(config: "PreTrainedConfig", coefficient: float | None = None) -> Balancing | None:
    """The balancing of a model's configuration, or with `coefficient` in its place; 0 means none.

    A configuration asks with `output_router_logits`, as the losses of transformers read it. Raises ModelError for a
    coefficient of a model that has no such loss.
    """
    text = config.get_text_config()
    nested = getattr(text, "ffn_config", None)  # DBRX
    known = [getattr(text, name) for name in _COEFFICIENTS if getattr(text, name, None) is not None]
    known += [nested.moe_loss_weight] if hasattr(nested, "moe_loss_weight") else []
    if not known:
        if coefficient:
            raise ModelError(
                f"balancing_coefficient is {coefficient:g}, but a {text.model_type} model has no loss that balances "
                "experts: leave it out"
            )
        return None
    if coefficient is None:
        coefficient = float(known[0]) if getattr(text, "output_router_logits", False) else 0.0
    per_token = nested.moe_top_k if hasattr(nested, "moe_top_k") else text.num_experts_per_tok
    return Balancing(coefficient=coefficient, experts_per_token=per_token) if coefficient else None
