"""Loads models from a folder, the Hub or a random start, and probes that they can run packed.

Weights are float32, whatever dtype the checkpoint has: bf16 training also needs float32 master weights.
"""

import copy
import logging
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from proximo.distributed.unread_parameters import read_all
from proximo.distributed.world import current
from proximo.errors import CheckpointError, ModelError, memory_ran_out
from proximo.hub import TOKENIZER_FILES, is_local, within_reach
from proximo.models.heads import check_same_rows
from proximo.models.language import LanguageModel
from proximo.models.lora import is_on_layers_alone, load_adapter, merge
from proximo.models.precision.placement import Precision
from proximo.models.pretrained.folders import refuse_bare_adapter
from proximo.models.pretrained.sharded_folders import assemble, holds_shards, unread_model
from proximo.models.pretrained.sources import (
    ModelSource,
    adapter_base,
    adapter_folder,
    first_part,
    hub_file,
    read_config,
    why_unread,
)
from proximo.models.pretrained.vocabulary import (
    check_same_vocabulary,
    load_tokenizer,
    refuse_unembedded,
    vocabulary_size,
)
from proximo.models.probe import probe_language_model, probe_scalar_model
from proximo.models.quantised import carry_flags, loading_options, settle_products
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model, scalar_over
from proximo.models.sharing import HEAD_FILE, load_head
from proximo.models.transformers_model import own_randomness, quiet_transformers

LOG = logging.getLogger("proximo.models")


def load_language_model(
    source: ModelSource,
    *,
    device: torch.device,
    precision: Precision = Precision.FLOAT32,
    tokenizer: PreTrainedTokenizerBase | None = None,
    by_shards: bool = False,
) -> LanguageModel:
    """A causal language model in eval mode, probed.

    `tokenizer` is used for a random start only: it gives the vocabulary size and special token ids that the config
    omits. An adapter that changes more than linear layers is merged. `by_shards`: leave its numbers in their files
    until it is sharded, where that is possible; every rank has to call it. Raises ModelError if the model cannot be
    loaded or packed.
    """
    base = adapter_base(source)
    plain = _plain_language_model(base or source, tokenizer, device, by_shards=by_shards)
    model = LanguageModel(plain, precision=precision)
    probe_language_model(model)
    settle_products(plain, precision)
    if base is None:
        return model
    if by_shards:
        say_whole(source, "its adapter is merged into the base")
        read_all(plain)
    folder = adapter_folder(source, with_weights=True)
    assert folder is not None, "it has a base"
    adapted = load_adapter(plain, folder).eval()
    beside = is_on_layers_alone(adapted)
    return LanguageModel(adapted if beside else merge(adapted), precision=precision)


def load_scalar_model(
    source: ModelSource,
    *,
    fresh_head: HeadStart | None,
    device: torch.device,
    precision: Precision = Precision.FLOAT32,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    by_shards: bool = False,
) -> ScalarModel:
    """A value or reward model in eval mode, probed. The head is read even if the model is loaded `by_shards`.

    A sequence-classification checkpoint keeps its head. So does the folder `value` of a run with a value head on the
    policy's trunk; its layers are those of the policy in the same run, with adapters merged. A language model or a
    random start gets `fresh_head`, drawn from `seed`; with None they are refused.
    """
    if source.path is not None and (Path(source.path) / HEAD_FILE).is_file():
        layers = load_language_model(
            _trunk_below(Path(source.path)), device=device, precision=precision, by_shards=by_shards
        )
        model = scalar_from_language_model(layers, HeadStart.ZERO)
        load_head(model, Path(source.path))
        return model
    refuse_bare_adapter(adapter_folder(source), source.name)
    config = read_config(source)
    if _is_classifier(config):
        saved = _saved_model(AutoModelForSequenceClassification, source, config, device, by_shards=by_shards)
        model = ScalarModel(saved, precision=precision)
        read_all(saved.get_submodule("score"))
    elif fresh_head is None:
        raise ModelError(
            f"{source.name} is a language model without a trained scalar head; train a reward model from it first, or "
            "ask for a fresh head"
        )
    else:
        plain = _plain_language_model(source, tokenizer, device, by_shards=by_shards)
        model = scalar_over(plain.base_model, fresh_head, seed=seed, precision=precision)
        carry_flags(plain, model.base)
    probe_scalar_model(model)
    settle_products(model.base, precision)
    return model


def check_tokenizer(
    source: ModelSource, tokenizer: PreTrainedTokenizerBase, *, role: str, added: Collection[str] = ()
) -> None:
    """Raises ModelError if `tokenizer` does not fit the model that `source` names. Reads no weights.

    Its tokens must have the ids of the tokenizer in the model's folder, if there is one, and a row in the embedding,
    which may have more rows. `added` are tokens that the stage adds on purpose; an adapter's tokenizer has those that
    its own training added.
    """
    own = None if tokenizer.name_or_path == source.path else _own_tokenizer(source)
    if own is not None:
        check_same_vocabulary(tokenizer, own, role=role, added=added)
    if source.path is not None and (Path(source.path) / HEAD_FILE).is_file():
        source = _trunk_below(Path(source.path))
    base = adapter_base(source)
    if base is not None:
        added = {*added, *tokenizer.get_added_vocab()}
    if source.config is None or "vocab_size" in source.config:
        num_rows = read_config(base or source).get_text_config().vocab_size
        refuse_unembedded(tokenizer, num_rows, role=role, added=added)


def check_same_output(source: ModelSource, reference: ModelSource, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ModelError if the output layer of `reference` has another vocabulary than `source`. Reads no weights."""
    check_same_rows(*(max(_num_rows(each, tokenizer), vocabulary_size(tokenizer)) for each in (source, reference)))


def _num_rows(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> int:
    if source.config is not None and "vocab_size" not in source.config:
        return vocabulary_size(tokenizer)
    return read_config(adapter_base(source) or source).get_text_config().vocab_size


def _own_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase | None:
    if source.path is None:
        return None
    folder = Path(source.path)
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    of_hub = not is_local(source.path) and adapter_folder(source) is not None
    if of_hub and not any(hub_file(source, name) for name in TOKENIZER_FILES):
        return None
    return load_tokenizer(source.path, revision=source.revision)


def _trunk_below(folder: Path) -> ModelSource:
    """The policy whose layers the value head in `folder` uses."""
    policy = folder.absolute().with_name("policy")
    if not policy.is_dir():
        raise ModelError(
            f"{folder} holds only a value head; its layers are those of the policy of the run, and there is no {policy}"
        )
    return ModelSource(path=str(policy))


def say_whole(source: ModelSource, why: str) -> None:
    """Log, on rank 0, that a model is whole in the memory of every host while it is loaded."""
    if current().leads:
        LOG.warning("%s is whole on the host of every rank until it is sharded: %s", source.name, why)


def _plain_language_model(
    source: ModelSource, tokenizer: PreTrainedTokenizerBase | None, device: torch.device, *, by_shards: bool
) -> PreTrainedModel:
    config = read_config(source)
    if source.config is None:
        return _saved_model(AutoModelForCausalLM, source, config, device, by_shards=by_shards)
    if by_shards:
        say_whole(source, "its random weights are drawn together")
    if tokenizer is not None:
        _fit_to_tokenizer(config, tokenizer, source.config)
    return random_model(config, source).to(device)


def random_model(config: PreTrainedConfig, source: ModelSource) -> PreTrainedModel:
    """A model with random weights, drawn on the CPU, so that a seed gives the same weights for every device.

    Raises ModelError if the architecture cannot be built from its config.
    """
    try:
        with own_randomness(torch.device("cpu"), seed=source.seed), quiet_transformers():
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    except (ValueError, TypeError, RuntimeError, KeyError, AttributeError, ImportError, AssertionError) as error:
        raise ModelError(f"{source.name} cannot be built from its config: {first_part(error)}") from error


def _fit_to_tokenizer(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, given: Any) -> None:
    """Fill ids that the user's config omits from the tokenizer. The class defaults, such as EOS = 2, are of another
    one."""
    if "vocab_size" not in given:
        config.vocab_size = vocabulary_size(tokenizer)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if name not in given:
            setattr(config, name, getattr(tokenizer, name))
            continue
        ids = given[name] if isinstance(given[name], list) else [given[name]]
        if max((index for index in ids if index is not None), default=0) >= config.vocab_size:
            raise ModelError(
                f"the config of a new {config.model_type} model has {name} {given[name]}, but only {config.vocab_size} "
                f"tokens: leave {name} to the tokenizer, or give a larger vocab_size"
            )


def _saved_model(
    loader: Any, source: ModelSource, config: PreTrainedConfig, device: torch.device, *, by_shards: bool
) -> PreTrainedModel:
    """Load a checkpoint. Raises ModelError for missing, unexpected and mismatched weights."""
    if by_shards:
        with _explaining(source, device), quiet_transformers(), within_reach(source.path or ""):
            unread = unread_model(loader, source, config)
        if not isinstance(unread, str):
            return _complete(source, *unread).eval()
        say_whole(source, unread)
    kind = source.quantisation
    if source.path is not None and holds_shards(Path(source.path)):
        return _assembled_model(loader, source, config).to(device)
    options = {} if kind is None else loading_options(kind, device)
    with _explaining(source, device), quiet_transformers(), within_reach(source.path or ""):
        model, report = loader.from_pretrained(
            source.path,
            revision=source.revision,
            config=copy.deepcopy(config),
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    _complete(source, model, report)
    if kind is None:
        return model.eval().to(device)
    settle_products(model, Precision.FLOAT32)  # for the probe
    return model.eval()


@contextmanager
def _explaining(source: ModelSource, device: torch.device) -> Generator[None]:
    """Inside, any error becomes a ModelError that names the source: each library raises other types."""
    try:
        yield
    except Exception as error:  # safetensors, pickle and each architecture raise different types
        if memory_ran_out(error):
            raise
        how = "" if source.quantisation is None else f" with quantisation {source.quantisation} on {device}"
        why = first_part(error) if source.path is None else why_unread(source.path, error, weights=True)
        raise ModelError(f"the weights of {source.name} cannot be read{how}: {why}") from error


def _complete(source: ModelSource, model: PreTrainedModel, report: Mapping[str, Any]) -> PreTrainedModel:
    """The model. Raises ModelError if transformers reports weights that are missing, left over or mismatched."""
    mismatched = {f"{name} ({list(saved)}, not {list(wanted)})" for name, saved, wanted in report["mismatched_keys"]}
    faults = {"missing": report["missing_keys"], "left over": report["unexpected_keys"], "of another shape": mismatched}
    found = [f"{len(names)} {fault}: {_some(names)}" for fault, names in faults.items() if names]
    if found:
        raise ModelError(f"the weights of {source.name} do not fit a {type(model).__name__}: {'; '.join(found)}")
    return model


def _assembled_model(loader: Any, source: ModelSource, config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a checkpoint that several ranks wrote."""
    if source.quantisation is not None:
        raise ModelError(
            f"the weights of {source.name} are in one file per rank and cannot be read with quantisation "
            f"{source.quantisation}: export them first with `proximo export`"
        )
    try:
        return assemble(Path(source.path or ""), copy.deepcopy(config), loader=loader, dtype=torch.float32)
    except CheckpointError as error:
        raise ModelError(f"the weights of {source.name} cannot be read: {error}") from error


def _is_classifier(config: PreTrainedConfig) -> bool:
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def _some(names: Iterable[str], limit: int = 4) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:limit]) + (f" and {len(ordered) - limit} more" if len(ordered) > limit else "")
