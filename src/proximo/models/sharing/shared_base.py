"""Several models over one set of base weights: each role has its own modules and adapter, and the tensors are shared.

No adapter is switched on or off, so gradients cannot depend on the time of a switch: the modules of a role always run
its own adapter, in the forward pass and in the recomputation of activation checkpointing.
"""

import copy
from pathlib import Path
from typing import TYPE_CHECKING

from proximo.errors import ModelError
from proximo.hub import is_local
from proximo.models.adapter_detection import base_of, is_adapted
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions, brings_other_vocabulary, is_on_layers_alone, load_adapter
from proximo.models.pretrained.folders import read_adapter_config
from proximo.models.pretrained.sources import ModelSource, adapter_base
from proximo.models.quantised import beside_weights, carry_flags
from proximo.models.scalar import HeadStart, ScalarModel, scalar_over

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel


def base_alone(model: LanguageModel) -> LanguageModel:
    """The base below the adapter as a separate model in eval mode: the policy before training.

    Raises ModelError for a model without an adapter, since its base is trained.
    """
    return LanguageModel(_shared_base(model).eval(), precision=model.precision)


def value_on_base(policy: LanguageModel, options: LoRAOptions, start: HeadStart, *, seed: int = 0) -> ScalarModel:
    """A value model on the policy's base, with its own adapter and head.

    Raises ModelError for a policy without an adapter, and for an architecture that cannot have a scalar head.
    """
    return _scalar_on_base(policy, start, seed=seed).with_adapter(options)


def scalar_from_adapter(policy: LanguageModel, folder: Path, *, role: str) -> ScalarModel:
    """The reward or value model with the adapter and head in `folder`, on the policy's base. Both may train.

    Raises ModelError if the adapter was trained on another base or has no scalar head.
    """
    check_scalar_adapter(ModelSource(path=policy.base.name_or_path), folder, role=role)
    model = _scalar_on_base(policy, HeadStart.ZERO, seed=0)
    advice = "export it with --merge and remove share_base"
    if brings_other_vocabulary(model.base, folder):
        raise ModelError(
            f"share_base of the {role} model: the adapter in {folder} brings an embedding unlike the base's, since its "
            f"training added tokens or changed some; {advice}"
        )
    adapted = load_adapter(model.base, folder).eval()
    if not is_on_layers_alone(adapted):
        raise ModelError(
            f"share_base of the {role} model: the adapter in {folder} trained more than linear layers and a scalar "
            f"head; {advice}"
        )
    return ScalarModel(adapted, precision=policy.precision)


def check_scalar_adapter(source: ModelSource, folder: Path, *, role: str) -> None:
    """Raises ModelError unless `folder` holds an adapter with a scalar head that was trained on the model of `source`.

    Reads no weights: a base is known by its folder, or by its name and revision on the Hub.
    """
    base = adapter_base(ModelSource(path=str(folder)))
    if base is None:
        raise ModelError(
            f"share_base of the {role} model needs a folder with an adapter, and {folder} holds none: train one with "
            "model.lora, or remove share_base"
        )
    saved = read_adapter_config(folder)
    if "score" not in (saved.get("modules_to_save") or ()):
        raise ModelError(f"the adapter in {folder} has no scalar head, so it is not a {role} model")
    if _identity(base) != _identity(source):
        raise ModelError(
            f"share_base of the {role} model: the adapter in {folder} was trained on {_spelt(base)}, but the policy's "
            f"base is {_spelt(source)}; start the policy from {_spelt(base)}, or export the {role} model with --merge "
            "and remove share_base"
        )


def is_shared(first: LanguageModel | ScalarModel, second: LanguageModel | ScalarModel) -> bool:
    """True if both models run on the same base tensors."""
    return next(first.base.parameters()) is next(second.base.parameters())


def _scalar_on_base(policy: LanguageModel, start: HeadStart, *, seed: int) -> ScalarModel:
    base = _shared_base(policy)
    model = scalar_over(base.base_model, start, seed=seed, precision=policy.precision)
    carry_flags(base, model.base)
    model.backbone.balancing = policy.backbone.balancing
    return model


def _shared_base(model: LanguageModel) -> "PreTrainedModel":
    """New modules and configurations over the same parameters and buffers, without the adapter's."""
    if not is_adapted(model.model):
        raise ModelError(
            "only the base below an adapter is shared, since nothing trains it, and this model has no adapter; take a "
            "frozen_copy, or give it one"
        )
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    base = base_of(model.model)
    kept = {id(each): each for each in (*base.parameters(), *base.buffers(), *beside_weights(base))}
    for module in base.modules():
        if isinstance(module, BaseTunerLayer):  # copy the wrapped layer in place of the adapter's wrapper
            kept[id(module)] = copy.deepcopy(module.get_base_layer(), kept)
        elif isinstance(module, AuxiliaryTrainingWrapper):
            kept[id(module)] = copy.deepcopy(module.original_module, kept)
    return copy.deepcopy(base, kept)


def _identity(source: ModelSource) -> tuple[str | None, str | None]:
    if source.path is not None and is_local(source.path):
        return str(Path(source.path).expanduser().resolve()), None
    return source.path, source.revision


def _spelt(source: ModelSource) -> str:
    return source.name if source.revision is None else f"{source.name} at {source.revision}"
