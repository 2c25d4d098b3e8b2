"""On several ranks models are built on the host, and each rank moves what it holds to its device afterwards."""

from typing import Any

import pytest
import torch
from torch import nn

from builders import tiny_language_model
from proximo.config.devices import DevicesConfig
from proximo.config.run import RunConfig
from proximo.distributed.world import World, using
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.precision import placement
from proximo.run.make import models
from proximo.run.make.sharding import shard_model


class TwoRanks(World):
    """A world whose other rank is never asked for anything."""

    size = 2


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run on a device that is not here."""
    monkeypatch.setattr(models, "resolve_device", lambda name: torch.device("cuda", 1))
    monkeypatch.setattr(placement.torch.cuda, "is_available", lambda: True)
    return RunConfig(folder="run", precision="float32", device="cuda")


def test_models_are_loaded_on_the_host_and_belong_to_the_device(accelerated: RunConfig) -> None:
    with using(TwoRanks()) as world:
        spec = models.prepare_device(accelerated)
        assert (spec.device, spec.loading_device, world.device) == (
            *(torch.device("cuda", 1), torch.device("cpu"), torch.device("cuda", 1)),
        )
    assert models.prepare_device(accelerated).loading_device == torch.device("cuda", 1)


def test_a_replicated_model_goes_to_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    model, moves = LanguageModel(tiny_language_model()), list[Any]()
    monkeypatch.setattr(model.model, "to", moves.append)
    with using(TwoRanks()) as world:
        world.device = torch.device("cuda", 1)
        shard_model(model, DevicesConfig(shard="replicate"), role="policy")
    assert moves == [torch.device("cuda", 1)]


def test_an_idle_model_lies_on_the_host_between_its_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on one rank; a model that trains stays on its device."""
    model, moves = LanguageModel(tiny_language_model()), list[str]()
    monkeypatch.setattr(model.model, "to", lambda device: moves.append(str(device)))
    devices = DevicesConfig(offload="idle", shard="replicate")
    shard_model(model, devices, role="policy")
    assert model.backbone.idle is None
    model.model.requires_grad_(False)
    shard_model(model, devices, role="reference")
    monkeypatch.setattr(model.backbone, "home", torch.device("cuda", 1))
    with model.backbone.at_work(), model.backbone.at_work():
        moves.append("at work")
    assert moves == ["cpu", "cuda:1", "at work", "cpu"]


def test_passes_run_on_the_device_while_the_weights_are_elsewhere() -> None:
    model = LanguageModel(tiny_language_model())
    model.backbone.home = torch.device("cuda", 1)
    assert model.device == torch.device("cuda", 1)


def test_a_model_of_which_a_part_lies_elsewhere_is_moved_whole() -> None:
    """Whichever part that is: here the adapter, whose base, with the first parameter, is there already."""
    model = LanguageModel(tiny_language_model().to("meta")).with_adapter(LoRAOptions())
    for name, module in model.model.named_modules():
        if "lora_" in name and isinstance(module, nn.Linear):
            module.to_empty(device="cpu")
    assert {parameter.device.type for parameter in model.model.parameters()} == {"meta", "cpu"}
    with using(World()) as world:
        world.device = torch.device("meta")
        shard_model(model, DevicesConfig(), role="model")
    assert {parameter.device.type for parameter in model.model.parameters()} == {"meta"}
