"""Builds the models of a run without weights, from configurations alone.

Reads only config.json and the tokenizer of a local folder or Hub repository.
"""

import copy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from proximo.config.run import ModelConfig, ScalarModelConfig, TokenizerConfig
from proximo.errors import ModelError
from proximo.hub import is_local
from proximo.models.language import LanguageModel
from proximo.models.loading import random_model
from proximo.models.lora import LoRAOptions
from proximo.models.precision.placement import Precision
from proximo.models.pretrained.sources import ModelSource, adapter_base, read_config
from proximo.models.pretrained.vocabulary import vocabulary_size
from proximo.models.scalar import ScalarModel, no_classifier
from proximo.models.sharing import base_alone
from proximo.models.transformers_model import disable_dropout, freeze_layers, own_randomness, quiet_transformers
from proximo.run.checkpoint_lookup import stage_result
from proximo.run.make.models import build_tokenizer, lora_options

Model = LanguageModel | ScalarModel


@dataclass(kw_only=True)
class ModelConfigs:
    """Looks up model configurations by the paths in a recipe."""

    folder: Path | None = None
    """The pipeline's run folder, to look up results of stages that have finished; None for a single stage."""
    results: dict[str, PreTrainedConfig] = field(default_factory=dict)
    """`@sft` or `@reward` -> configuration of that stage's result."""
    adapters: dict[str, LoRAOptions] = field(default_factory=dict)
    """`@reward` -> the adapter that the stage trains, if any."""

    def config(self, path: str, revision: str | None = None) -> PreTrainedConfig:
        """The configuration of a trained model. Raises ModelError if it cannot be read."""
        if path in self.results:
            return copy.deepcopy(self.results[path])
        if path.startswith("@") and self.folder is not None:
            path = str(stage_result(self.folder, path))
        source = ModelSource(path=path, revision=revision)
        try:
            return read_config(adapter_base(source) or source)
        except ModelError as error:
            if is_local(path):
                raise
            raise ModelError(
                f"{error}. A plan needs the model's config.json: give the path of a local folder that holds it"
            ) from error

    def sized(self, section: ModelConfig | ScalarModelConfig, num_tokens: int | None) -> PreTrainedConfig:
        """The configuration of a section's model, with at least `num_tokens` embeddings."""
        if section.path is not None:
            config = self.config(section.path, section.revision)
        else:
            config = read_config(ModelSource(config=section.config))
            if num_tokens is not None and "vocab_size" not in (section.config or {}):
                config.get_text_config().vocab_size = num_tokens
        text = config.get_text_config()
        text.vocab_size = max(text.vocab_size, num_tokens or 0)
        return config

    def num_tokens(self, tokenizer: TokenizerConfig, model: ModelConfig | ScalarModelConfig) -> int | None:
        """Vocabulary size of the tokenizer; None if the model's own `vocab_size` decides."""
        if tokenizer.train_vocab_size is not None:
            return tokenizer.train_vocab_size + len(tokenizer.added_tokens)
        path = tokenizer.path or model.path
        if path in self.results:
            return self.results[path].get_text_config().vocab_size + len(tokenizer.added_tokens)
        if tokenizer.path is None and not tokenizer.added_tokens:
            return None
        if path is not None and path.startswith("@") and self.folder is not None:
            tokenizer = tokenizer.model_copy(update={"path": str(stage_result(self.folder, path))})
        return vocabulary_size(build_tokenizer(tokenizer, model_path=model.path, revision=model.revision))

    def adapter(self, path: str) -> LoRAOptions:
        """Options of a reward model's adapter on the policy's base.

        Raises ModelError if Proximo did not write the adapter.
        """
        from peft import LoraConfig, PeftConfig

        if path in self.adapters:
            return self.adapters[path]
        if path.startswith("@") and self.folder is not None:
            path = str(stage_result(self.folder, path))
        config = PeftConfig.from_pretrained(path)
        targets = getattr(config, "target_modules", None)
        if not isinstance(config, LoraConfig) or config.rank_pattern or not targets or isinstance(targets, str):
            raise ModelError(f"no plan: the adapter in {path} is not one that Proximo writes, of one rank throughout")
        return LoRAOptions(rank=config.r, alpha=config.lora_alpha, target_modules=tuple(sorted(targets)))


def language_model(
    config: PreTrainedConfig, section: ModelConfig, *, precision: Precision, dropout: bool = False
) -> LanguageModel:
    """A language model without weights, equal in shape to that of `build_language_model`.

    Call it inside `building()`.
    """
    plain = random_model(config, ModelSource(config={"model_type": config.model_type}))
    plain.name_or_path = section.path or ""
    model = LanguageModel(plain, precision=precision)
    if section.lora is not None:
        model = model.with_adapter(lora_options(section.lora, seed=0))
    apply_options(model, section, dropout=dropout)
    return model


def scalar_model(
    config: PreTrainedConfig, section: ScalarModelConfig, *, precision: Precision, dropout: bool = False
) -> ScalarModel:
    """A scalar model without weights, equal in shape to that of `build_scalar_model`. Call it inside `building()`."""
    config = copy.deepcopy(config)
    config.num_labels = 1
    try:
        with own_randomness(torch.device("cpu"), seed=0), quiet_transformers():
            plain = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise no_classifier(config.model_type) from error
    model = ScalarModel(plain, precision=precision)
    if section.lora is not None:
        model = model.with_adapter(lora_options(section.lora, seed=0))
    apply_options(model, section, dropout=dropout)
    return model


def apply_options(model: Model, section: ModelConfig | ScalarModelConfig, *, dropout: bool = False) -> None:
    """Apply a section's frozen layers, activation checkpointing, dropout and balancing of experts."""
    freeze_layers(model.base, section.frozen_layers)
    if section.balancing_coefficient is not None:
        model.backbone.balance(section.balancing_coefficient)
    if section.activation_checkpointing:
        model.use_activation_checkpointing()
    if not dropout:
        disable_dropout(model.model)


def freeze(model: ScalarModel | LanguageModel) -> Model:
    """Turn off the gradients of all parameters, in place, and return the model."""
    model.model.requires_grad_(False)
    return model


PLAIN = ModelConfig(config={"model_type": "any"})
"""A model section without adapter, frozen layers or checkpointing."""


def make_reference(
    section: ModelConfig | None, policy: LanguageModel, configs: ModelConfigs, num_tokens: int | None
) -> Model:
    """The reference model: the named one, or else the base of a policy with an adapter, or a copy of the policy."""
    if section is not None:
        return freeze(language_model(configs.sized(section, num_tokens), PLAIN, precision=policy.precision))
    return base_alone(policy) if policy.has_adapter else policy.frozen_copy()
