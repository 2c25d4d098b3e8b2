"""Several models on one set of base weights: one copy of the tensors, each model's own numbers and gradients."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from architectures import build_architecture, random_sequences
from builders import tiny_language_model
from proximo.distributed.unread_parameters import unread_in
from proximo.errors import ModelError
from proximo.models.language import LanguageModel
from proximo.models.loading import load_language_model
from proximo.models.lora import LoRAOptions
from proximo.models.packing import pack, pack_responses
from proximo.models.pretrained.saving import save_pretrained
from proximo.models.pretrained.sources import ModelSource
from proximo.models.pretrained.vocabulary import resize_vocabulary
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.models.sharing import (
    base_alone,
    check_scalar_adapter,
    is_shared,
    scalar_from_adapter,
    value_on_base,
)
from proximo.models.transformers_model import disable_dropout

PACKED = pack(random_sequences([9, 3, 14, 6]))
OPTIONS = LoRAOptions(rank=2)


def stirred(model: LanguageModel | ScalarModel, seed: int) -> None:
    """Everything that trains away from its start, so that every adapter and head does something of its own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in model.trainable_parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def adapted(architecture: str = "llama") -> LanguageModel:
    model = LanguageModel(build_architecture(architecture)).with_adapter(OPTIONS)
    stirred(model, seed=1)
    return model


def base_pointers(model: LanguageModel | ScalarModel) -> set[int]:
    """Addresses of all tensors that are neither an adapter's nor a scalar head's."""
    tensors = [*model.model.named_parameters(), *model.model.named_buffers()]
    return {tensor.data_ptr() for name, tensor in tensors if "lora_" not in name and "score" not in name}


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen2", "mixtral", "gemma2"])
@torch.no_grad()
def test_below_an_adapter_that_learned_is_the_base_bit_for_bit(architecture: str) -> None:
    plain = LanguageModel(build_architecture(architecture)).hidden_states(PACKED)
    model = adapted(architecture)
    before = model.hidden_states(PACKED)
    reference = base_alone(model)
    assert reference.hidden_states(PACKED).equal(plain)
    assert not any("lora" in name for name, _ in reference.model.named_parameters())
    assert base_pointers(reference) == base_pointers(model)
    assert model.hidden_states(PACKED).equal(before)
    assert (before - plain).abs().max() > 1e-2


def test_only_one_set_of_base_tensors_is_in_memory(tmp_path: Path) -> None:
    policy, folder = on_disk(tmp_path)
    others = [
        base_alone(policy),
        value_on_base(policy, OPTIONS, HeadStart.ZERO),
        scalar_from_adapter(policy, folder, role="reward"),
    ]
    kept = base_pointers(policy)
    for model in others:
        assert is_shared(model, policy)
        # A scalar model has no output layer: it holds a part of the policy's tensors, and none beside them.
        assert base_pointers(model) <= kept
    assert base_pointers(others[0]) == kept
    assert not is_shared(scalar_from_language_model(policy, HeadStart.ZERO), policy)


def on_disk(place: Path, architecture: str = "llama") -> tuple[LanguageModel, Path]:
    """A policy with an adapter on a saved base, and the folder of a reward adapter that was trained on it."""
    build_architecture(architecture).save_pretrained(place / "base")
    source = build_architecture(architecture)
    source.config._name_or_path = source.name_or_path = str(place / "base")
    reward = scalar_from_language_model(LanguageModel(source), HeadStart.NORMAL, seed=3).with_adapter(OPTIONS)
    stirred(reward, seed=7)
    save_pretrained(reward.model, place / "reward")
    policy = LanguageModel(source).with_adapter(OPTIONS)
    stirred(policy, seed=1)
    return policy, place / "reward"


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen2", "mixtral"])
@torch.no_grad()
def test_a_reward_adapter_on_the_shared_base_is_the_separate_reward_model(architecture: str, tmp_path: Path) -> None:
    policy, folder = on_disk(tmp_path, architecture)
    plain = LanguageModel(build_architecture(architecture))
    separate = scalar_from_language_model(plain, HeadStart.NORMAL, seed=3).with_adapter(OPTIONS)
    stirred(separate, seed=7)
    shared = scalar_from_adapter(policy, folder, role="reward")
    expected = separate.sequence_scores(PACKED)
    assert shared.sequence_scores(PACKED).equal(expected)
    assert expected.abs().min() > 0
    stirred(policy, seed=2)
    assert shared.sequence_scores(PACKED).equal(expected)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_roles_that_interleave_have_the_gradients_of_separate_models(architecture: str, checkpointing: bool) -> None:
    """All forward passes first, the other roles' passes in between, then all backward passes in the same order."""

    def roles(policy: LanguageModel, origin: LanguageModel | None) -> tuple[LanguageModel, ScalarModel]:
        if origin is None:
            value = value_on_base(policy, OPTIONS, HeadStart.NORMAL, seed=5)
        else:
            value = scalar_from_language_model(origin, HeadStart.NORMAL, seed=5).with_adapter(OPTIONS)
        stirred(value, seed=4)
        for model in (policy, value):
            disable_dropout(model.model)
            if checkpointing:
                model.use_activation_checkpointing()
            model.model.train()
        return policy, value

    sequences = random_sequences([9, 14])
    batch = pack_responses([each[:2] for each in sequences], [each[2:] for each in sequences])
    policy, value = roles(adapted(architecture), None)
    of_policy, of_value = policy.response_logprobs(batch).logprobs.sum(), value.response_values(batch).square().sum()
    with torch.no_grad():
        base_alone(policy).hidden_states(batch.packed)
    of_policy.backward()
    of_value.backward()
    alone, critic = roles(adapted(architecture), LanguageModel(build_architecture(architecture)))
    alone.response_logprobs(batch).logprobs.sum().backward()
    critic.response_values(batch).square().sum().backward()
    for shared, separate in ((policy, alone), (value, critic)):
        expected = dict(separate.trainable_parameters())
        found = dict(shared.trainable_parameters())
        assert found.keys() == expected.keys()
        for name, parameter in found.items():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name
            assert parameter.grad.equal(expected[name].grad), name


def test_making_a_role_changes_no_weight_and_no_requires_grad_of_another() -> None:
    policy = adapted()
    flags = {name: parameter.requires_grad for name, parameter in policy.model.named_parameters()}
    weights = copy.deepcopy(policy.model.state_dict())
    value = value_on_base(policy, OPTIONS, HeadStart.ZERO)
    reference = base_alone(policy)
    assert {name: parameter.requires_grad for name, parameter in policy.model.named_parameters()} == flags
    assert all(tensor.equal(weights[name]) for name, tensor in policy.model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())
    assert all("lora_" in name or "score" in name for name, _ in value.trainable_parameters())
    assert not {id(p) for _, p in value.trainable_parameters()} & {id(p) for _, p in policy.trainable_parameters()}


def test_a_base_that_trains_is_not_shared() -> None:
    with pytest.raises(ModelError, match="only the base below an adapter is shared.*take a frozen_copy"):
        base_alone(LanguageModel(tiny_language_model()))


def test_an_adapter_of_another_base_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    _, folder = on_disk(tmp_path)
    check_scalar_adapter(ModelSource(path=str(tmp_path / "." / "base")), folder, role="reward")
    (tmp_path / "link").symlink_to(tmp_path / "base")
    check_scalar_adapter(ModelSource(path=str(tmp_path / "link")), folder, role="reward")
    (tmp_path / "other").mkdir()
    for other in (ModelSource(path=str(tmp_path / "other")), ModelSource(path="owner/name", revision="v2")):
        with pytest.raises(ModelError, match="was trained on .*base, but the policy's base is .*start the policy from"):
            check_scalar_adapter(other, folder, role="reward")


def test_a_folder_without_adapter_and_an_adapter_without_head_are_refused(tmp_path: Path) -> None:
    policy, _ = on_disk(tmp_path)
    with pytest.raises(ModelError, match="share_base of the reward model needs a folder with an adapter"):
        scalar_from_adapter(policy, tmp_path / "base", role="reward")
    save_pretrained(policy.model, tmp_path / "policy")
    with pytest.raises(ModelError, match="has no scalar head, so it is not a reward model"):
        scalar_from_adapter(policy, tmp_path / "policy", role="reward")


def test_an_adapter_that_brings_an_embedding_of_its_own_is_refused_on_a_base_that_others_use(tmp_path: Path) -> None:
    """It would change the rows of all of them. The same rows, which the policy added too, are no others."""
    tiny_language_model().save_pretrained(tmp_path / "base")

    def grown() -> LanguageModel:
        source = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        resize_vocabulary(source, 66)
        return LanguageModel(source)

    reward = scalar_from_language_model(grown(), HeadStart.NORMAL).with_adapter(OPTIONS)
    save_pretrained(reward.model, tmp_path / "reward")
    policy = grown().with_adapter(OPTIONS)
    before = policy.base.model.embed_tokens.weight.detach().clone()
    assert scalar_from_adapter(policy, tmp_path / "reward", role="reward").base.config.vocab_size == 66
    assert policy.base.model.embed_tokens.weight.equal(before)
    small = LanguageModel(AutoModelForCausalLM.from_pretrained(tmp_path / "base")).with_adapter(OPTIONS)
    with torch.no_grad():
        policy.base.model.embed_tokens.weight[65] += 1
    for other in (small, policy):
        with pytest.raises(ModelError, match="brings an embedding unlike the base's.*--merge and remove share_base"):
            scalar_from_adapter(other, tmp_path / "reward", role="reward")


def test_an_adapter_that_trained_more_than_layers_is_refused_on_a_base_that_others_use(tmp_path: Path) -> None:
    policy, folder = on_disk(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    options = LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"], modules_to_save=["score", "norm"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, in peft
        get_peft_model(model, options).save_pretrained(folder)
    with pytest.raises(ModelError, match="trained more than linear layers and a scalar head; export it with --merge"):
        scalar_from_adapter(policy, folder, role="reward")


def test_the_rows_of_a_base_that_was_not_read_yet_are_those_in_its_files(tmp_path: Path) -> None:
    """On ranks, a base has no numbers before it is sharded."""
    tiny_language_model().save_pretrained(tmp_path / "base")
    source = ModelSource(path=str(tmp_path / "base"))

    def grown(*, by_shards: bool = False) -> LanguageModel:
        model = load_language_model(source, device=torch.device("cpu"), by_shards=by_shards)
        resize_vocabulary(model.base, 66)
        return model

    reward = scalar_from_language_model(grown(), HeadStart.NORMAL).with_adapter(OPTIONS)
    save_pretrained(reward.model, tmp_path / "reward")
    policy = grown(by_shards=True).with_adapter(OPTIONS)
    assert unread_in([policy.model])
    scalar_from_adapter(policy, tmp_path / "reward", role="reward")
