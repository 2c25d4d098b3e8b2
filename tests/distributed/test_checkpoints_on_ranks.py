"""What n ranks saved, m ranks restore: weights and optimizer state in the same bits, also from and to one process."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from transformers import PreTrainedModel

from architectures import build_architecture
from builders import tiny_tokenizer
from distributed.ranks import Ranks
from proximo.checkpoint.ranks import Captured, RankWriter
from proximo.checkpoint.reading import read_manifest
from proximo.checkpoint.store import CheckpointStore
from proximo.commands.export import export_model
from proximo.config.devices import DevicesConfig
from proximo.distributed.shard_files import SavedShards
from proximo.distributed.world import current, whole
from proximo.errors import CheckpointError
from proximo.learner.optimizers import OptimizerOptions
from proximo.learner.update import Learner
from proximo.models.language import LanguageModel
from proximo.models.loading import load_language_model, load_scalar_model
from proximo.models.lora import LoRAOptions
from proximo.models.pretrained.sources import ModelSource
from proximo.models.pretrained.vocabulary import embedding_rows, resize_vocabulary, vocabulary_layers
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.models.sharing import scalar_on
from proximo.models.transformers_model import freeze_layers
from proximo.run.checkpointing import consolidate, restore_models, update_counts, writers_for
from proximo.run.make.sharding import shard_model

CASES: dict[str, dict[str, Any]] = {
    # 61 tokens and 48 rows over 2 and 3 ranks: uneven shards; a value head has one row, so that ranks have empty ones.
    "full": {"devices": {"shard": "full"}},
    "grads_tied": {"devices": {"shard": "grads"}, "architecture": "qwen2"},
    "offload_frozen": {"devices": {"shard": "full", "offload": "always"}, "dtype": torch.float64, "frozen_layers": 1},
    "copies_experts": {"devices": {"shard": "full", "shard_size": 1}, "architecture": "qwen3_moe"},
    "experts": {"devices": {"shard": "full"}, "architecture": "qwen3_moe"},
    "lora": {"devices": {"shard": "full"}, "lora": True},
    "lora_added_rows": {"devices": {"shard": "full"}, "lora": True, "added_rows": 3},
    "trunk": {"devices": {"shard": "full"}, "trunk": True},
    "value": {"three": True, "devices": {"shard": "full"}, "scalar": True},
    "replicate": {"devices": {"shard": "replicate"}},
}


class Built:
    """The models of a case on this rank, with a learner that has not learned yet."""

    def __init__(self, name: str, seed: int, folder: Path) -> None:
        case = CASES[name]
        dtype = case.get("dtype", torch.float32)
        base_seed = 1 if case.get("lora") else seed  # a checkpoint of an adapter has no base
        plain = build_architecture(case.get("architecture", "llama"), seed=base_seed, dtype=dtype)
        if case.get("added_rows"):
            self._add_rows(plain, case["added_rows"], folder.parent / "base", shift=seed)
        model: LanguageModel | ScalarModel = LanguageModel(plain)
        if case.get("frozen_layers"):
            freeze_layers(model.base, case["frozen_layers"])
        if case.get("lora"):
            model = model.with_adapter(LoRAOptions(rank=3, seed=seed))
        if case.get("scalar"):
            model = scalar_from_language_model(model, HeadStart.NORMAL, seed=seed)
        self.head = scalar_on(model, HeadStart.NORMAL, seed=seed) if case.get("trunk") else None
        self.role = "value" if case.get("scalar") else "policy"
        self.models = {self.role: model}
        shard_model(model, DevicesConfig(**case["devices"]), role=self.role, on_trunk=self.head)
        module = model.model
        if self.head is not None:
            module = torch.nn.ModuleDict({"policy": module, "head": self.head.base.get_submodule("score")})
        sharding = model.backbone.sharding
        learner = Learner(module, OptimizerOptions(learning_rate=1e-2), num_updates=9, sharding=sharding)
        self.learners = {self.role: learner}

    @torch.no_grad()
    def _add_rows(self, plain: PreTrainedModel, count: int, base: Path, *, shift: int) -> None:
        """More tokens than the model in the folder `base` has; the checkpoint must say what their rows are."""
        plain.name_or_path = str(base)
        old = embedding_rows(plain)
        resize_vocabulary(plain, old + count)
        for layer in vocabulary_layers(plain):
            layer.weight[old:] += shift

    def learn(self) -> None:
        """An update whose gradients are functions of the weights alone."""
        learner = self.learners[self.role]
        for parameter in learner.parameters.values():
            parameter.grad = parameter.detach().cos()
        learner.optimizer.step()
        learner.updates_done += 1

    def everything(self) -> dict[str, Tensor]:
        """All weights and all optimizer state, whole."""
        learner = self.learners[self.role]
        found = {name: whole(p.detach()).clone() for name, p in self.models[self.role].model.named_parameters()}
        for name, parameter in learner.parameters.items():
            found[f"weight of {name}"] = whole(parameter.detach()).clone()
            for field, value in learner.optimizer.state[parameter].items():
                found[f"{field} of {name}"] = whole(value).clone()
        return found


def save(folder: Path, name: str, step: int = 1) -> dict[str, Tensor]:
    """Learn twice, save, and go on learning while the save is under way; what was to be saved, whole."""
    built = Built(name, seed=1, folder=folder)
    built.learn()
    built.learn()
    wanted = built.everything()
    store = CheckpointStore(folder)
    writers = writers_for(built.models, built.learners, tiny_tokenizer(), head=built.head)
    store.save(step, writers, {"task": {"updates": update_counts(built.learners)}}, metric=0.5)
    for _ in range(3):
        built.learn()
        built.everything()  # gathers beside the save
    store.finish()
    return wanted


def restore(folder: Path, name: str) -> dict[str, Tensor]:
    """What models of other weights have after the checkpoint was restored into them."""
    built = Built(name, seed=2, folder=folder)
    built.learn()
    checkpoint = current().on_rank_0(CheckpointStore(folder).load, what="a test")
    restore_models(checkpoint, built.models, built.learners, head=built.head)
    assert built.learners[built.role].updates_done == 2
    return built.everything()


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_two_ranks_save_and_two_three_and_one_restore(two: Ranks, three: Ranks, tmp_path):
    build_architecture("llama").save_pretrained(tmp_path / "base")
    for name, case in CASES.items():
        if name == "experts":  # below
            continue
        folder = tmp_path / name
        wanted = two.run(save, folder, name)[0]
        for found in (*two.run(restore, folder, name), restore(folder, name)):
            assert_equal(found, wanted)
        if case.get("three"):
            for found in three.run(restore, folder, name):
                assert_equal(found, wanted)


def test_three_ranks_save_for_two_and_one_for_two(two: Ranks, three: Ranks, tmp_path):
    wanted = three.run(save, tmp_path / "three", "trunk")[0]
    assert_equal(two.run(restore, tmp_path / "three", "trunk")[1], wanted)
    wanted = save(tmp_path / "one", "trunk")
    assert_equal(two.run(restore, tmp_path / "one", "trunk")[1], wanted)


STATE = {"task": {"updates": {"policy": 2, "value": 2}}}


def save_only(folder: Path, name: str, step: int) -> None:
    built = Built(name, seed=step, folder=folder)
    built.learn()
    store = CheckpointStore(folder)
    store.save(step, writers_for(built.models, built.learners, tiny_tokenizer(), head=built.head), STATE, metric=-step)
    store.finish()


def folder_of_one_process(folder: Path, name: str, step: int) -> Path:
    save_only(folder, name, step)
    return folder / f"step-{step:06d}"


def test_shards_are_read_as_the_whole_model_and_made_whole_at_the_end(two: Ranks, tmp_path):
    """What one process writes of the same weights is what comes out, bit for bit."""
    for name in ("grads_tied", "experts", "value"):
        folder, role = tmp_path / name, "value" if name == "value" else "policy"
        for step in (1, 2, 3):
            two.run(save_only, folder, name, step)
        store = CheckpointStore(folder)
        assert (store.best().step, store.latest().step) == (1, 3)
        alone = folder_of_one_process(tmp_path / f"{name}-alone", name, 2) / role
        sharded = folder / "step-000002" / role
        assert not list(sharded.glob("*.safetensors"))
        export_model(sharded, tmp_path / f"{name}-exported", merge=False)
        export_model(alone, tmp_path / f"{name}-exported-alone", merge=False)
        assert files(tmp_path / f"{name}-exported") == files(tmp_path / f"{name}-exported-alone")
        load = load_scalar_model if name == "value" else load_language_model
        options = {"fresh_head": None} if name == "value" else {}
        models = [load(ModelSource(path=str(f)), device=torch.device("cpu"), **options) for f in (sharded, alone)]
        assert_equal(*(dict(model.model.named_parameters()) for model in models))
        assert_equal(*(dict(model.model.named_buffers()) for model in models))

        consolidate(store)
        for step in (1, 3):
            alone = folder_of_one_process(tmp_path / f"{name}-alone", name, step) / role
            assert files(store.load(step).folder / role) == files(alone)
        assert (sharded / "shards").is_dir(), "neither the latest nor the best"
        assert_equal(restore(folder, name), two.run(restore, folder, name)[1])


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_shards_too(two: Ranks, tmp_path):
    two.run(save_only, tmp_path, "full", 1)
    model = build_architecture("llama", seed=5)
    state = {name: tensor.detach() for name, tensor in model.named_parameters()}
    shards = tmp_path / "step-000001" / "policy" / "shards"
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(shards)), no_dist=True)
    built = Built("full", seed=1, folder=tmp_path)
    built.learn()
    assert_equal(state, dict(built.models["policy"].model.named_parameters()))


def damage(shards: Path, how: str) -> None:
    file = shards / "rank-00001.safetensors"
    match how:
        case "missing":
            file.unlink()
        case "cut":
            file.write_bytes(file.read_bytes()[:-8])
        case "no index":
            (shards / "shards.json").write_text("{}")


def test_what_is_no_whole_set_of_shards_is_refused(two: Ranks, tmp_path):
    two.run(save_only, tmp_path / "run", "full", 1)
    for how in ("missing", "cut", "no index"):
        copy = shutil.copytree(tmp_path / "run", tmp_path / how)
        shards = copy / "step-000001" / "policy" / "shards"
        damage(shards, how)
        with pytest.raises(CheckpointError, match=r"the shards in .* cannot be read"):
            SavedShards(shards)
        with pytest.raises(CheckpointError, match=r"step 1 is not complete: .*policy/shards"):
            CheckpointStore(copy).load()


def test_the_manifest_of_a_checkpoint_of_ranks_lists_their_files(two: Ranks, tmp_path):
    two.run(save_only, tmp_path / "sharded", "full", 1)
    assert read_manifest(tmp_path / "sharded" / "step-000001").files.keys() >= {
        "optimizer/policy/rank-00001.safetensors",
        "optimizer/policy/shards.json",
        "policy/shards/rank-00000.safetensors",
        "policy/tokenizer.json",
    }


def save_with_failing_rank(folder: Path) -> str:
    """On real ranks: the second one cannot write. What each of them is told."""

    def each(path: Path) -> Path:
        if current().rank == 1:
            raise OSError(28, "No space left on device")
        (path / "mine").write_bytes(b"mine")
        return path / "mine"

    store = CheckpointStore(folder)
    policy = RankWriter(capture=lambda: Captured(first=Path.mkdir, each=each))
    store.save(1, {"policy": policy}, {})
    with pytest.raises(CheckpointError) as told:
        store.finish()
    current().barrier(what="a test")
    return str(told.value)


def test_all_ranks_are_told_of_the_one_that_could_not_write(two: Ranks, tmp_path):
    first, second = two.run(save_with_failing_rank, tmp_path / "checkpoints")
    assert first == second
    assert "rank 1: OSError: [Errno 28] No space left on device" in first
    assert CheckpointStore(tmp_path / "checkpoints").latest() is None
