"""Models of which each rank reads its shards alone have the weights of models that are loaded whole, bit for bit."""

import gc
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from architectures import ARCHITECTURES
from builders import tiny_language_model
from distributed.ranks import Ranks, joined
from distributed.test_memory_of_ranks import live_bytes
from proximo.config.devices import DevicesConfig
from proximo.config.run import ModelConfig, RunConfig, ScalarModelConfig
from proximo.distributed.shard_files import SavedTensor
from proximo.distributed.unread_parameters import unread_in
from proximo.distributed.world import current, whole
from proximo.errors import ModelError
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.pretrained.saving import save_pretrained
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.models.sharing import base_alone, value_on_base
from proximo.models.transformers_model import decoder_layers
from proximo.run.make.models import (
    DeviceSpec,
    build_language_model,
    build_scalar_model,
    build_value_on_trunk,
    prepare_device,
)
from proximo.run.make.sharding import shard_model
from proximo.run.resumption import model_digest

Model = LanguageModel | ScalarModel
LORA: dict[str, Any] = {"rank": 2, "alpha": 4.0}
SHAPES = ("llama", "qwen2", "gemma3", "gpt2", "gpt_oss")
"""Untied and tied, alternating layers, matrices that lie the other way, stacked experts."""


def save_models(place: Path) -> Path:
    """A bf16 folder for each shape, one of them in several files; one with a tied matrix twice; float32, a classifier
    and an adapter."""
    for name in (*SHAPES, "qwen3_moe"):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**ARCHITECTURES[name]), dtype=torch.bfloat16)
        model.generation_config.eos_token_id = [2, 5]
        model.save_pretrained(place / name, max_shard_size="20KB" if name == "gpt2" else "5GB")
    shutil.copytree(place / "qwen2", place / "twice")
    tensors = load_file(place / "twice" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, place / "twice" / "model.safetensors", metadata={"format": "pt"})
    language = LanguageModel(tiny_language_model(seed=3))
    save_pretrained(language.model, place / "float32")
    save_pretrained(scalar_from_language_model(language, HeadStart.NORMAL, seed=4).model, place / "classifier")
    language.base.name_or_path = str(place / "float32")
    adapted = language.with_adapter(LoRAOptions(rank=2, seed=5))
    for name, weight in adapted.model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    save_pretrained(adapted.model, place / "adapter")
    return place


class LargerTokenizer:
    """As many tokens as a model is to embed; nothing else of it is read here."""

    def __init__(self, size: int) -> None:
        self._size = size

    def get_vocab(self) -> dict[str, int]:
        return {str(index): index for index in range(self._size)}


def tokenizer(size: int) -> PreTrainedTokenizerBase:
    made: Any = LargerTokenizer(size)
    return made


def language(place: Path, name: str, spec: DeviceSpec, *, size: int = 10, **options: Any) -> LanguageModel:
    config = ModelConfig(path=str(place / name), **options)
    return build_language_model(config, tokenizer(size), device_spec=spec)


def scalar(place: Path, name: str, spec: DeviceSpec, **options: Any) -> ScalarModel:
    config = ScalarModelConfig(path=str(place / name), **options)
    return build_scalar_model(config, tokenizer(10), fresh_head=HeadStart.NORMAL, device_spec=spec)


def copies(place: Path, spec: DeviceSpec) -> list[Model]:
    policy = language(place, "llama", spec)
    return [policy, policy.frozen_copy(), scalar_from_language_model(policy, HeadStart.ZERO)]


def on_one_base(place: Path, spec: DeviceSpec) -> list[Model]:
    policy = language(place, "llama", spec, lora=LORA)
    return [policy, value_on_base(policy, LoRAOptions(rank=2, seed=6), HeadStart.NORMAL, seed=7), base_alone(policy)]


def on_one_trunk(place: Path, spec: DeviceSpec) -> list[Model]:
    policy = language(place, "float32", spec)
    config = ScalarModelConfig(init_from="trunk").model_copy(update={"path": str(place / "classifier")})
    return [policy, build_value_on_trunk(config, policy, device_spec=spec)]


def narrow(place: Path, spec: DeviceSpec) -> list[Model]:
    models = [language(place, name, spec) for name in ("llama", "float32")]
    for model in models:
        model.model.requires_grad_(False)
        model.narrow_frozen()
    return list(models)


CASES: dict[str, Callable[[Path, DeviceSpec], list[Model]]] = {
    **{name: lambda place, spec, name=name: [language(place, name, spec)] for name in SHAPES},
    "float32": lambda place, spec: [language(place, "float32", spec)],
    "a tied matrix twice": lambda place, spec: [language(place, "twice", spec, size=size) for size in (10, 65)],
    "grown": lambda place, spec: [language(place, name, spec, size=65) for name in ("llama", "qwen2")],
    "lora": lambda place, spec: [language(place, "llama", spec, lora=LORA, size=65)],
    "a new head": lambda place, spec: [scalar(place, "qwen2", spec)],
    "a head": lambda place, spec: [scalar(place, "classifier", spec, lora=LORA)],
    "an adapter merged": lambda place, spec: [language(place, "adapter", spec)],
    "fused experts": lambda place, spec: [language(place, "qwen3_moe", spec)],
    "copies": copies,
    "one base": on_one_base,
    "one trunk": on_one_trunk,
    "narrow": narrow,
}
WHOLE = {"an adapter merged": "its adapter is merged", "fused experts": "together from those in its files"}
"""Cases in which a model is loaded whole, and what is said of it."""


def spec_of(case: str) -> DeviceSpec:
    return prepare_device(
        RunConfig(folder="unused", seed=3, device="cpu", precision="bf16" if case == "narrow" else "float32")
    )


def described(models: list[Model]) -> list[dict[str, Any]]:
    return [
        {
            "weights": {name: whole(weight).detach().clone() for name, weight in model.model.named_parameters()},
            "trained": {name for name, weight in model.model.named_parameters() if weight.requires_grad},
            "buffers": {name: buffer.clone() for name, buffer in model.model.named_buffers()},
            "config": model.base.config.to_dict() | {"transformers_version": None},
            "generation": repr(getattr(model.base, "generation_config", None)),
            "name": model.base.name_or_path,
            "class": type(model.base).__name__,
            "is_training": model.model.training,
        }
        for model in models
    ]


def laid(case: str, place: Path, shard: str) -> dict[str, Any]:
    """The models of a case as they lie on the ranks, digests from before, and what was said while they were loaded."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("proximo.models").addHandler(handler)
    models = CASES[case](place, spec_of(case))
    logging.getLogger("proximo.models").removeHandler(handler)
    num_unread = sum(len(unread_in([model.model])) for model in models)
    digests = [model_digest(model.model) for model in models]
    trunk = models[1] if case == "one trunk" else None
    devices = DevicesConfig.model_validate({"shard": shard})
    for model in models:
        if model is not trunk:
            beside = [other.model for other in models if other not in (model, trunk)]
            on_trunk = trunk if isinstance(trunk, ScalarModel) else None
            shard_model(model, devices, role="policy", on_trunk=on_trunk, beside=beside)
    left = sum(len(unread_in([model.model])) for model in models)
    return {"models": described(models), "digests": digests, "unread": (num_unread, left), "said": said}


def check_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key, value in wanted.items():
        if isinstance(value, dict) and value and isinstance(next(iter(value.values())), Tensor):
            assert found[key].keys() == value.keys()
            for name, tensor in value.items():
                assert found[key][name].dtype == tensor.dtype, name
                assert torch.equal(found[key][name], tensor), name
        else:
            assert found[key] == value, key


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("case", CASES)
def test_shards_of_files_are_the_weights_of_the_files(two: Ranks, case: str, place: Path) -> None:
    wanted = laid(case, place, "full")
    assert wanted["unread"] == (0, 0)
    for rank, found in enumerate(two.run(laid, case, place, "full")):
        for mine, others in zip(found["models"], wanted["models"], strict=True):
            check_equal(mine, others)
        assert found["digests"] == wanted["digests"]
        num_unread, left = found["unread"]
        assert left == 0
        assert (num_unread == 0) == (case in WHOLE)
        assert [WHOLE.get(case, "") in each for each in found["said"]] == (
            [True] if case in WHOLE and rank == 0 else []
        )


def test_models_that_are_replicated_are_read_whole(two: Ranks, place: Path) -> None:
    wanted = laid("copies", place, "replicate")
    for found in two.run(laid, "copies", place, "replicate"):
        for mine, others in zip(found["models"], wanted["models"], strict=True):
            check_equal(mine, others)
        assert found["unread"][0] > 0
        assert found["unread"][1] == 0


DEEP = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "vocab_size": 130}
SMALL = 10_000
"""Bytes of buffers, and of a row that a rank has more."""
PASSES = 100_000
"""At most, of what the probe computes."""


def largest_on_host(folder: Path, by_shards: bool) -> dict[str, Any]:
    """Most bytes of tensors on this rank while three models are loaded and sharded, and what lies there afterwards.

    Noted whenever a part of a file was read, whole or not, and whenever FSDP begins with a module.
    """
    notes: list[int] = []
    read = SavedTensor.read

    def reading(*arguments: Any) -> Tensor:
        result = read(*arguments)
        notes.append(live_bytes())
        return result

    def arrive(*_: Any) -> None:
        notes.append(live_bytes())

    spec = replace(spec_of("float32"), by_shards=by_shards)
    language(folder, "deep", spec)  # what libraries keep of a first use
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedTensor, "read", reading)
        patch.setattr("torch.distributed.fsdp._fully_shard._fsdp_init._move_states_to_device", arrive)
        policy = language(folder, "deep", spec)
        notes.append(live_bytes())
        models = [policy, policy.frozen_copy(), scalar_from_language_model(policy, HeadStart.ZERO)]
        probed = max(notes)
        notes.clear()
        for model in models:
            beside = [other.model for other in models if other is not model]
            shard_model(model, DevicesConfig.model_validate({"shard": "full"}), role="policy", beside=beside)
    gc.unfreeze()
    tensors = [t for model in models for t in (*model.model.parameters(), *model.model.buffers())]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    shards = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}.values())
    return {"probed": probed, "most": max(notes), "shards": shards}


def test_a_rank_has_no_more_on_its_host_than_its_shards_and_a_layer(two: Ranks, tmp_path: Path) -> None:
    """Of three models together, in bytes of tensors that it can reach. Rank 0 also has, in the probe, what is outside
    of the layers."""
    model = tiny_language_model(**DEEP)
    model.save_pretrained(tmp_path / "deep")
    layer = sum(parameter.nbytes for parameter in decoder_layers(model)[0].parameters())
    whole_model = sum(parameter.nbytes for parameter in model.parameters())
    outside = whole_model - DEEP["num_hidden_layers"] * layer
    for rank, found in enumerate(two.run(largest_on_host, tmp_path, True)):
        print(f"rank {rank}: {found}; a layer {layer}, outside of layers {outside}, a model {whole_model}")
        assert found["shards"] == pytest.approx(1.5 * whole_model - outside / 4, rel=0.02)
        assert found["most"] < found["shards"] + layer + SMALL
        assert found["probed"] < (layer + outside + PASSES if rank == 0 else SMALL)
    assert two.run(largest_on_host, tmp_path, False)[0]["probed"] > whole_model


@pytest.mark.parametrize("layer", [1, 3])
def test_numbers_that_are_not_finite_are_refused(layer: int, tmp_path: Path) -> None:
    """Of the first layers by the probe on rank 0, of others by the rank that reads them as its shard."""
    model, name = tiny_language_model(num_hidden_layers=4), f"model.layers.{layer}.mlp.up_proj.weight"
    with torch.no_grad():
        model.get_parameter(name)[-1, 3] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    ends = joined(load_and_shard, tmp_path)
    rank = 0 if layer == 1 else 1
    assert re.match(rf"ModelError: the tensor {name} .*holds 1 .*values that are not finite", ends[rank].error)
    assert re.match(f"RankError: rank {rank}.*{name}.*not finite", ends[1 - rank].error)


def saved_by_a_library(place: Path, name: str, folder: Path, lora: bool) -> dict[str, Tensor]:
    """What `save_pretrained` wrote of a model on ranks, and the type of what `state_dict` gives."""
    model = language(place, name, spec_of(name), **({"lora": LORA} if lora else {}))
    shard_model(model, DevicesConfig.model_validate({"shard": "full"}), role="policy")
    if current().size > 1:
        assert all(isinstance(tensor, DTensor) for tensor in model.model.state_dict().values())
    save_pretrained(model.model, folder)
    current().barrier(what="the end")
    return {key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()}


@pytest.mark.parametrize(("name", "lora"), [("qwen2", False), ("llama", True)])
def test_a_library_saves_a_model_that_lies_on_ranks(
    two: Ranks, name: str, lora: bool, place: Path, tmp_path: Path
) -> None:
    wanted = saved_by_a_library(place, name, tmp_path / "one", lora)
    for found in two.run(saved_by_a_library, place, name, tmp_path / "two", lora):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def load_and_shard(folder: Path) -> None:
    shard_model(
        language(folder, "broken", spec_of("broken")), DevicesConfig.model_validate({"shard": "full"}), role="policy"
    )
    current().barrier(what="the end")


def test_files_that_do_not_fit_are_named_by_every_rank(two: Ranks, tmp_path: Path) -> None:
    model = tiny_language_model()
    state = model.state_dict()
    del state["model.norm.weight"]
    model.save_pretrained(tmp_path / "lacking", state_dict=state)
    for message in two.run(message_of, tmp_path):
        assert message == "1 missing: model.norm.weight"


def message_of(folder: Path) -> str:
    with pytest.raises(ModelError, match="do not fit a LlamaForCausalLM: ") as raised:
        language(folder, "lacking", spec_of("lacking"))
    return str(raised.value).partition("LlamaForCausalLM: ")[2]
