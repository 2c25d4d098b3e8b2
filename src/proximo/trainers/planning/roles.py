"""The models of a run without their weights: built from configurations alone. Not what a run does with them.

To be called inside `shapes_only()`. A folder or Hub name is asked for its config.json and its tokenizer only.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from proximo.config.run import ModelConfig, ScalarModelConfig, TokenizerConfig
from proximo.errors import ModelError
from proximo.learner.optimizer import trainable_parameters
from proximo.models.dropout import disable_dropout
from proximo.models.freezing import freeze_layers
from proximo.models.language import LanguageModel
from proximo.models.loading import random_model
from proximo.models.placement import Precision
from proximo.models.quiet import quiet_transformers
from proximo.models.randomness import own_randomness
from proximo.models.rehearsal import building, rehearsable
from proximo.models.scalar import ScalarModel
from proximo.models.sources import ModelSource, adapter_base, first_part, is_local, read_config
from proximo.models.vocabulary import vocabulary_size
from proximo.trainers.build import build_tokenizer, lora_options
from proximo.trainers.pipeline import stage_result

Model = LanguageModel | ScalarModel


@dataclass(kw_only=True)
class Origins:
    """Configurations by what a recipe calls them."""

    folder: Path | None = None
    """Of the pipeline, for stages that are left out because they ran before."""
    results: dict[str, PreTrainedConfig] = field(default_factory=dict)
    """`@sft` and `@reward`: the configuration of what that stage makes."""

    def config(self, path: str, revision: str | None = None) -> PreTrainedConfig:
        """Of a trained model. Raises ModelError where it cannot be read."""
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
        """Of a section's model, with an embedding for each of the tokenizer's tokens."""
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
        """Of the tokenizer; None where the model's own configuration says all there is to say."""
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


def language_model(
    config: PreTrainedConfig, section: ModelConfig, *, precision: Precision, dropout: bool = False
) -> LanguageModel:
    """As `build_language_model` makes it."""
    with building():
        model = LanguageModel(random_model(config, ModelSource(config={"model_type": config.model_type})))
        if section.lora is not None:
            model = model.with_adapter(lora_options(section.lora, seed=0))
    _finish(model, section, dropout=dropout)
    return LanguageModel(model.model, precision=precision)


def scalar_model(
    config: PreTrainedConfig, section: ScalarModelConfig, *, precision: Precision, dropout: bool = False
) -> ScalarModel:
    """As `build_scalar_model` makes it."""
    config = copy.deepcopy(config)
    config.num_labels = 1
    with building():
        try:
            with own_randomness(torch.device("cpu"), seed=0), quiet_transformers():
                plain = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        except ValueError as error:
            raise ModelError(f"a {config.model_type} model cannot carry a scalar head: {first_part(error)}") from error
        model = ScalarModel(plain)
        if section.lora is not None:
            model = model.with_adapter(lora_options(section.lora, seed=0))
    _finish(model, section, dropout=dropout)
    return ScalarModel(model.model, precision=precision)


def _finish(model: Model, section: ModelConfig | ScalarModelConfig, *, dropout: bool) -> None:
    freeze_layers(model.base, section.frozen_layers)
    if section.activation_checkpointing:
        model.use_activation_checkpointing()
    if not dropout:
        disable_dropout(model.model)
    rehearsable(model.model)


def parameter_count(model: Model) -> int:
    """Tied ones once."""
    return sum(parameter.numel() for parameter in model.model.parameters())


def trained_count(model: Model) -> int:
    """Parameters that an optimizer moves."""
    return sum(parameter.numel() for parameter in trainable_parameters(model.model).values())


def weight_bytes(model: Model) -> int:
    """Parameters and buffers, shared ones once."""
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in (*model.model.parameters(), *model.model.buffers())
    }
    return sum(storages.values())


def optimizer_bytes(model: Model) -> int:
    """Both moments of AdamW, and the step of each tensor."""
    tensors = trainable_parameters(model.model).values()
    return sum(2 * tensor.numel() * tensor.element_size() + 4 for tensor in tensors)


def held_bytes(models: Mapping[str, Model]) -> dict[str, int]:
    """Part -> bytes that are held in every phase."""
    parts = {f"{role} weights": weight_bytes(model) for role, model in models.items()}
    trained = {f"{role} optimizer": optimizer_bytes(model) for role, model in models.items()}
    return parts | {name: size for name, size in trained.items() if size}
