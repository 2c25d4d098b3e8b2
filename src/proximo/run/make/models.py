"""Builds tokenizers, models and reward sources from the sections of a recipe."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from proximo.config.rewards.kinds import RewardSourceConfig
from proximo.config.rewards.sources import ModelRewardConfig, PRMRewardConfig
from proximo.config.run import LoRAConfig, ModelConfig, RunConfig, ScalarModelConfig, TokenizerConfig
from proximo.data.templates.chat import check_syntax, end_of_turn_ids
from proximo.data.tokenise import TextEncoder
from proximo.data.tokenizer_training import train_tokenizer
from proximo.distributed.world import current
from proximo.errors import ConfigError
from proximo.models.backbone import check_compiler
from proximo.models.language import LanguageModel, PackedModel
from proximo.models.loading import check_tokenizer, load_language_model, load_scalar_model
from proximo.models.lora import LoRAOptions, add_adapter, merged_copy
from proximo.models.precision.placement import (
    Precision,
    resolve_device,
    resolve_precision,
    use_deterministic_kernels,
    use_tf32,
)
from proximo.models.pretrained.folders import refuse_second_adapter
from proximo.models.pretrained.sources import (
    ModelSource,
    adapter_base,
    adapter_folder,
    adapter_or_folder,
    balancing_of,
    read_config,
)
from proximo.models.pretrained.vocabulary import load_tokenizer, resize_vocabulary, vocabulary_size
from proximo.models.quantised import Quantisation
from proximo.models.scalar import HeadStart, ScalarModel, step_separator_of
from proximo.models.sharing import copy_head, scalar_from_adapter, scalar_on
from proximo.models.transformers_model import freeze_layers, is_adapted
from proximo.rewards.model import ModelReward
from proximo.rewards.prm import ProcessReward
from proximo.rewards.source import RewardSource
from proximo.run.make.reward_sources import build_source_without_model


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """The device of a run's models and their precision."""

    device: torch.device
    precision: Precision
    seed: int
    compile: str = "none"
    """The torch.compile backend of trained models."""
    resolve: Callable[[str], Precision] | None = None
    """The precision of roles on another device; None if the run has one precision on every device."""
    by_shards: bool = False
    """Whether weights stay in their files until `shard_model` shards the model over the ranks."""

    @property
    def loading_device(self) -> torch.device:
        """Where models are loaded and copied: on several ranks the host, since a device may hold a shard only."""
        return torch.device("cpu") if current().size > 1 else self.device

    def on(self, device: str | None) -> "DeviceSpec":
        """The spec of a role on another device, with its precision there; None for this device.

        Raises ConfigError if the device does not exist or cannot compute in the precision of the run.
        """
        if device is None:
            return self
        resolved = resolve_device(device)
        check_compiler(self.compile, resolved)
        precision = self.precision if self.resolve is None else self.resolve(str(resolved))
        return replace(self, device=resolved, precision=precision)


def prepare_device(run: RunConfig) -> DeviceSpec:
    """Apply the thread count, and resolve device and precision before anything is loaded."""
    if run.num_threads is not None:
        torch.set_num_threads(run.num_threads)
    device = resolve_device(run.device)
    check_compiler(run.compile, device)
    head = run.head_precision == "float32"

    def resolve(name: str) -> Precision:
        return resolve_precision(run.precision, device=name, float32_head=head)

    precision = resolve(str(device))
    use_tf32(precision)
    use_deterministic_kernels(run.deterministic, device)
    if device.type == "cuda" and device.index is not None and device.index < torch.cuda.device_count():
        torch.cuda.set_device(device)
    if (world := current()).size > 1:
        world.device = device
    return DeviceSpec(
        device=device,
        precision=precision,
        seed=run.seed,
        compile=run.compile,
        resolve=resolve,
        by_shards=world.size > 1,
    )


def build_tokenizer(
    config: TokenizerConfig, *, model_path: str | None, revision: str | None = None, texts: Iterable[str] | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a stage: trained on `texts`, loaded from its own path, or loaded from the model's folder."""
    if config.train_vocab_size is not None:
        if texts is None:
            raise ConfigError(
                "tokenizer.train_vocab_size works in fine-tuning only, which has the texts to train it "
                "on; set tokenizer.path"
            )
        tokenizer: PreTrainedTokenizerBase = train_tokenizer(texts, vocab_size=config.train_vocab_size)
    else:
        path = config.path or model_path
        if path is None:
            raise ConfigError("a model from a config comes without a tokenizer: give tokenizer.path")
        tokenizer = load_tokenizer(path, revision=None if config.path else revision)
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    if config.added_tokens:
        tokenizer.add_special_tokens({"additional_special_tokens": list(config.added_tokens)})
    end_of_turn_ids(TextEncoder(tokenizer))  # refuses a template that loops before anything is read
    if config.chat_template is not None:
        check_syntax(config.chat_template)
    return tokenizer


def check_readers(
    config: TokenizerConfig,
    tokenizer: PreTrainedTokenizerBase,
    models: Mapping[str, ModelConfig | ScalarModelConfig | ModelRewardConfig | None],
) -> None:
    """Raises ModelError if a role's model does not use the token ids of the stage's tokenizer, or lacks the experts
    that its section balances. Reads no weights.

    A role maps to None if it needs no separate model.
    """
    for role, model in models.items():
        if model is not None:
            start = None if isinstance(model, ModelRewardConfig) else model.config
            source = ModelSource(path=model.path, revision=model.revision, config=start)
            check_tokenizer(source, tokenizer, role=role, added=config.added_tokens)
            if not isinstance(model, ModelRewardConfig) and model.balancing_coefficient:
                balancing_of(read_config(adapter_base(source) or source), model.balancing_coefficient)


def build_language_model(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, device_spec: DeviceSpec
) -> LanguageModel:
    """The model of a role, resized to one embedding per token, with its adapter if it has one.

    `check_readers` has compared tokenizer and model, so a token without an embedding was added by the user.
    """
    source = model_source(config, seed=device_spec.seed)
    if config.lora is not None:
        refuse_second_adapter(adapter_folder(source), source.name)
    # A quantised base is packed on its device, and never sharded.
    place = device_spec.loading_device if source.quantisation is None else device_spec.device
    model = load_language_model(
        source, device=place, precision=device_spec.precision, tokenizer=tokenizer, by_shards=device_spec.by_shards
    )
    if is_adapted(model.model):
        # An earlier adapter is part of this stage's start, and therefore of its reference.
        model = LanguageModel(merged_copy(model.model), precision=device_spec.precision)
    resize_vocabulary(model.base, vocabulary_size(tokenizer))
    if config.lora is not None:
        options = lora_options(config.lora, seed=device_spec.seed)
        model = LanguageModel(add_adapter(model.base, options), precision=device_spec.precision)
    _finish(model, config, device_spec)
    return model


def _finish(model: PackedModel, config: ModelConfig | ScalarModelConfig, device_spec: DeviceSpec) -> None:
    freeze_layers(model.base, config.frozen_layers)
    if config.activation_checkpointing:
        model.use_activation_checkpointing()
    if device_spec.compile != "none":
        model.compile(device_spec.compile)
    if config.balancing_coefficient is not None:
        model.backbone.balance(config.balancing_coefficient)


def model_source(config: ModelConfig | ScalarModelConfig, *, seed: int) -> ModelSource:
    """The source of the section's weights, and their quantisation."""
    kind = None if config.quantisation == "none" else Quantisation(config.quantisation)
    return ModelSource(path=config.path, revision=config.revision, config=config.config, seed=seed, quantisation=kind)


def build_reference(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, device_spec: DeviceSpec
) -> LanguageModel:
    """A frozen reference model."""
    reference = build_language_model(config, tokenizer, device_spec=device_spec)
    reference.model.requires_grad_(False)
    return reference


def build_scalar_model(
    config: ScalarModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    fresh_head: HeadStart | None,
    device_spec: DeviceSpec,
) -> ScalarModel:
    """A value or reward model from a path or config. `fresh_head` initialises a missing head; None refuses it."""
    source = model_source(config, seed=device_spec.seed)
    model = load_scalar_model(
        source,
        fresh_head=fresh_head,
        device=device_spec.loading_device if source.quantisation is None else device_spec.device,
        precision=device_spec.precision,
        seed=device_spec.seed,
        tokenizer=tokenizer,
        by_shards=device_spec.by_shards,
    )
    resize_vocabulary(model.base, vocabulary_size(tokenizer))
    return finish_scalar_model(model, config, device_spec=device_spec)


def build_value_on_trunk(config: ScalarModelConfig, policy: LanguageModel, *, device_spec: DeviceSpec) -> ScalarModel:
    """A value head on the policy's layers: a new head whose values are 0, or the head of the model at the path."""
    model = scalar_on(policy, HeadStart.ZERO, seed=device_spec.seed)
    if config.path is not None:
        source = ModelSource(path=config.path, revision=config.revision)
        place = torch.device("cpu")
        copy_head(model, load_scalar_model(source, fresh_head=None, device=place, by_shards=device_spec.by_shards))
    return model


def finish_scalar_model(model: ScalarModel, config: ScalarModelConfig, *, device_spec: DeviceSpec) -> ScalarModel:
    """Add the adapter, activation checkpointing and compilation that the recipe asks for."""
    if config.lora is not None:
        model = model.with_adapter(lora_options(config.lora, seed=device_spec.seed))
    _finish(model, config, device_spec)
    return model


def lora_options(config: LoRAConfig, *, seed: int) -> LoRAOptions:
    """The options of the adapter."""
    targets = None if config.target_modules == "all-linear" else tuple(config.target_modules)
    return LoRAOptions(rank=config.rank, alpha=config.alpha, target_modules=targets, seed=seed)


def build_reward_source(
    config: RewardSourceConfig,
    policy_tokenizer: PreTrainedTokenizerBase | None,
    *,
    device_spec: DeviceSpec,
    tokens_per_microbatch: int,
    policy: LanguageModel | None = None,
    own: PreTrainedTokenizerBase | None = None,
) -> RewardSource:
    """A reward source. A reward model whose vocabulary or template differs from the policy's reads text, not token ids.

    `policy_tokenizer`: None if responses come as text only. `policy`: for a reward model that shares its base. `own`:
    the reward model's tokenizer, if it was loaded already.
    """
    if not isinstance(config, ModelRewardConfig):
        return build_source_without_model(config)
    own = own or load_reward_tokenizer(config)
    if config.share_base:
        assert policy is not None
        model = scalar_from_adapter(policy, adapter_or_folder(config.path, config.revision), role="reward")
    else:
        source = ModelSource(path=config.path, revision=config.revision)
        device_spec = device_spec.on(config.device)
        model = load_scalar_model(
            source,
            fresh_head=None,
            device=device_spec.loading_device,
            precision=device_spec.precision,
            by_shards=device_spec.by_shards,
        )
    model.model.requires_grad_(False)
    if isinstance(config, PRMRewardConfig):
        return ProcessReward(
            model,
            own,
            policy_tokenizer=policy_tokenizer,
            step_separator=config.step_separator,
            aggregate=config.aggregate,
            dense=config.dense,
            name=config.name,
            tokens_per_microbatch=tokens_per_microbatch,
        )
    if step_separator_of(model.base.config) is not None:
        raise ConfigError(
            f"reward source {config.name!r}: {config.path} is a process reward model, which judges steps and not whole "
            "responses: set kind: prm"
        )
    return ModelReward(
        model,
        name=config.name,
        tokenizer=None if gives_same_ids(own, policy_tokenizer) else own,
        tokens_per_microbatch=tokens_per_microbatch,
        dense=config.dense,
    )


def reward_model_config(path: str) -> ModelRewardConfig:
    """The section of the reward model at `path`, with `kind: prm` where it judges steps. Reads no weights."""
    source = ModelSource(path=path)
    if adapter_base(source) is None and step_separator_of(read_config(source)) is not None:
        return PRMRewardConfig(kind="prm", path=path)
    return ModelRewardConfig(kind="model", path=path)


def load_reward_tokenizer(config: ModelRewardConfig) -> PreTrainedTokenizerBase:
    """A reward model's tokenizer. Raises ModelError if it does not fit the model or its chat template is broken."""
    own = load_tokenizer(config.tokenizer or config.path, revision=None if config.tokenizer else config.revision)
    check_tokenizer(ModelSource(path=config.path, revision=config.revision), own, role="reward")
    end_of_turn_ids(TextEncoder(own))
    return own


def gives_same_ids(own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase | None) -> bool:
    """Whether two tokenizers give the same ids for the same texts and messages."""
    if other is None:
        return False
    return own.get_vocab() == other.get_vocab() and own.chat_template == other.chat_template
