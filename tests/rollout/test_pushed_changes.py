"""Pushes that are written as changes: the same weights as whole ones, in fewer bytes, whatever a server missed."""

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from builders import tiny_language_model
from fake_vllm import FakeVLLM, Fault, engine_on, fake_servers
from proximo.errors import TrainingError
from proximo.models.language import LanguageModel
from proximo.records import Prompt
from proximo.rollout.engine import push_weights
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.rollout.vllm import changes, pushed_weights
from proximo.rollout.vllm.engine import VLLMEngine
from proximo.rollout.vllm.pushed_weights import PushedWeights

BF16 = torch.bfloat16
SIZE = 40_000
HEADER_BYTES = 2000
OPEN = ExitStack()
Push = dict[str, Tensor]


@pytest.fixture(autouse=True)
def on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No folder counts as one in memory."""
    monkeypatch.setattr(pushed_weights, "IN_MEMORY", tmp_path / "none")
    with OPEN:
        yield


def first_push() -> Push:
    torch.manual_seed(1)
    return {"a": torch.randn(200, 200).to(BF16), "b": torch.randn(SIZE).to(BF16), "c": torch.randn(()).to(BF16)}


def changed(push: Push, count: int, *, seed: int = 0) -> Push:
    """With `count` other entries in each of the two large tensors."""
    generator, made = torch.Generator().manual_seed(seed), {name: tensor.clone() for name, tensor in push.items()}
    for name in ("a", "b"):
        places = torch.randperm(SIZE, generator=generator)[:count]
        made[name].view(-1)[places] = made[name].view(-1)[places] + 2.0**10
    return made


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def same(found: Any, expected: Push) -> bool:
    return {name: tensor.view(torch.int16).tolist() for name, tensor in found} == {
        name: tensor.view(torch.int16).tolist() for name, tensor in expected.items()
    }


def test_a_push_of_few_changes_writes_six_bytes_for_each(tmp_path: Path) -> None:
    files, push = PushedWeights(tmp_path, adapter=None, num_tensors=3), first_push()
    push["a"][0, 0] = 0.0
    files.write(push.items())
    files.keep("first")
    whole = sizes(tmp_path / files.folder.name / "first")
    push = changed(push, 100)
    push["c"].fill_(torch.nan)
    push["a"][0, 0], push["b"][0] = -0.0, torch.inf  # -0.0 == 0.0 and nan != nan, but bits are sent
    folder = files.write(push.items())
    found = sizes(folder)
    assert {name: found[name] for name in whole} == whole
    assert 201 * 6 <= found["changes-00000.safetensors"] < 203 * 6 + HEADER_BYTES
    (digest,) = files.digests_of_changes
    assert digest == hashlib.sha256((folder / "changes-00000.safetensors").read_bytes()).hexdigest()
    assert files._written is not None
    assert same(files._written.tensors(), push)
    files.write(push.items())
    assert sizes(folder)["changes-00001.safetensors"] < HEADER_BYTES, "nothing changed"
    assert not any(len(entries) for entries in load_file(folder / "changes-00001.safetensors").values())


@pytest.mark.parametrize(("count", "is_whole"), [(SIZE // 25, False), (SIZE // 19, True)])
def test_more_than_five_in_a_hundred_changes_are_written_whole_with_each_tensor_asked_for_once(
    count: int, *, is_whole: bool, tmp_path: Path
) -> None:
    files, push = PushedWeights(tmp_path, adapter=None, num_tensors=3), first_push()
    files.write(push.items())
    push, asked = changed(push, count), list[str]()

    def each() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in push.items():
            asked.append(name)
            yield name, tensor

    folder = files.write(each())
    assert asked == ["a", "b", "c"]
    assert ("changes-00000.safetensors" in sizes(folder)) == (not is_whole)
    assert files._written is not None
    assert same(files._written.tensors(), push)
    assert len(list(files.folder.iterdir())) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda push: push | {"d": torch.ones(3).to(BF16)},
        lambda push: {"a": push["a"], "b": push["b"]},
        lambda push: push | {"b": push["b"].view(20, -1)},
        lambda push: push | {"b": push["b"].half()},
    ],
    ids=["one more", "one less", "another shape", "another type"],
)
def test_other_tensors_are_written_whole(other: Any, tmp_path: Path) -> None:
    files = PushedWeights(tmp_path, adapter=None, num_tensors=3)
    files.write(first_push().items())
    push = other(changed(first_push(), 10))
    folder = files.write(push.items())
    assert list(sizes(folder)) == ["model-00000.safetensors"]
    assert same(load_file(folder / "model-00000.safetensors").items(), push)


def test_changes_end_with_half_the_bytes_of_the_whole(tmp_path: Path) -> None:
    files, push = PushedWeights(tmp_path, adapter=None, num_tensors=3), first_push()
    files.write(push.items())
    kinds = []
    for number in range(8):
        push = changed(push, SIZE // 25, seed=number)
        kinds.append("changes-00000.safetensors" in sizes(files.write(push.items())))
        files.keep(f"push-{number}")
    # 4% of the entries take 12% of the bytes: after five such pushes a server reads 1.6 times the whole.
    assert kinds == [True, True, True, True, True, False, True, True]
    assert files._written is not None
    assert same(files._written.tensors(), push)
    assert [path.name for path in files.folder.iterdir()] == ["push-7"]


def test_of_float32_no_more_is_compared_than_shows_that_all_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = {f"t{n}": torch.randn(100) for n in range(100)}
    files, compared = PushedWeights(tmp_path, adapter=None, num_tensors=3), list[str]()
    files.write(push.items())
    tensor_of = changes.WrittenWeights._tensor
    monkeypatch.setattr(
        changes.WrittenWeights, "_tensor", lambda self, name: compared.append(name) or tensor_of(self, name)
    )
    files.write((name, tensor * 1.0001) for name, tensor in push.items())
    assert len(set(compared)) == 6


def test_in_memory_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushed_weights, "IN_MEMORY", tmp_path)
    files = PushedWeights(tmp_path, adapter=None, num_tensors=3)
    for _ in range(2):
        assert list(sizes(files.write(first_push().items()))) == ["model-00000.safetensors"]
    assert files.digests_of_changes == []


def served(
    policy: LanguageModel, tmp_path: Path, count: int = 1, fault: Fault | None = None
) -> tuple[VLLMEngine, list[FakeVLLM]]:
    first = LanguageModel(tiny_language_model(seed=9, hidden_size=64, initializer_range=0.2))
    fakes = OPEN.enter_context(fake_servers(first, count, fault))
    return engine_on(fakes, policy, OPEN, dtype=BF16, transfer_folder=tmp_path), fakes


def pushes(policy: LanguageModel, engine: VLLMEngine, count: int) -> None:
    """After each push the learner moves: two entries of each tensor beyond the rounding of bf16, one of them each time,
    and all others within it."""
    version = engine._last.holding.version + 1 if engine._last else 0
    for number in range(version, version + count):
        push_weights(engine, number, dict(policy.trainable_parameters()))
        with torch.no_grad():
            for _, tensor in policy.trainable_parameters():
                tensor.copy_(tensor.to(BF16).float() * (1 + 2.0**-12))
                tensor.view(-1)[[0, 1 + number % (tensor.numel() - 1)]] += 0.5


def model() -> LanguageModel:
    return LanguageModel(tiny_language_model(hidden_size=64, initializer_range=0.2))


def weights(policy: LanguageModel) -> Push:
    return {name: tensor.detach().clone() for name, tensor in policy.trainable_parameters()}


def num_changes(engine: VLLMEngine) -> int:
    return len(engine._files.digests_of_changes)


def test_servers_have_the_learners_weights_after_every_push_of_changes(tmp_path: Path) -> None:
    policy = model()
    engine, fakes = served(policy, tmp_path, count=2)
    for number in range(5):
        expected = weights(policy)
        pushes(policy, engine, 1)
        assert num_changes(engine) == number
        assert all(fake.has(expected, BF16) for fake in fakes)
        assert len(list(engine._files.folder.iterdir())) == 1


def test_a_server_that_restarted_or_missed_pushes_gets_all_changes(tmp_path: Path) -> None:
    """It needs nothing of an earlier push: the files hold the whole and what came after."""
    policy, seen = model(), {"restarted": False}

    def restart(fake: FakeVLLM, path: str, body: dict[str, Any]) -> None:
        if path == "/inference/v1/generate" and not seen["restarted"]:
            seen["restarted"] = True
            fake.restart()

    engine, (fake,) = served(policy, tmp_path, fault=restart)
    pushes(policy, engine, 3)
    expected = weights(policy)
    pushes(policy, engine, 1)
    prompts = [Prompt(id="p", token_ids=(5, 6, 7))]
    key = RandomKey(seed=3, purpose="rollout", step=1)
    (found,) = engine.generate(prompts, num_samples=1, options=SamplingOptions(max_new_tokens=3), key=key)
    assert found.policy_version == 3
    assert fake.has(expected, BF16)
    assert num_changes(engine) == 3
    assert engine.counts["stale"] == 1


def test_a_push_that_one_server_did_not_get_is_no_loss_for_the_next(tmp_path: Path) -> None:
    policy = model()

    def skip(fake: FakeVLLM, path: str, body: dict[str, Any]) -> Any:
        is_second = path in ("/update_weights", "/finish_weight_update") and fake.version.startswith("proximo-0-")
        return b"{}" if is_second else None

    engine, (fake,) = served(policy, tmp_path)
    pushes(policy, engine, 1)
    fake.fault = skip
    with pytest.raises(TrainingError, match="but holds nothing"):
        pushes(policy, engine, 1)
    fake.fault = None
    fake.finish(None)
    expected = weights(policy)
    pushes(policy, engine, 1)
    assert fake.has(expected, BF16)


@pytest.mark.parametrize("num_faulty", [1, 2])
def test_changes_that_a_server_reads_wrongly_are_followed_by_the_whole(
    num_faulty: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def stale(fake: FakeVLLM, path: str, body: dict[str, Any]) -> None:
        if path == "/update_weights" and "changes" in (info := body["update_info"]):
            seen = tmp_path / f"seen-{fakes.index(fake)}-{fake.counts[path]}"
            info["path"] = str(shutil.copytree(info["path"], seen))
            (file,) = Path(info["path"]).glob("changes-*")
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)

    policy = model()
    engine, fakes = served(policy, tmp_path, count=2)
    pushes(policy, engine, 1)
    for fake in fakes[:num_faulty]:
        fake.fault = stale
    expected = weights(policy)
    pushes(policy, engine, 1)
    assert fakes[0].has(expected, BF16)
    assert fakes[1].has(expected, BF16)
    assert "gets all weights instead of changes: status 500 (" in caplog.text
    assert "holds other changes than were announced" in caplog.text
    for fake in fakes:
        fake.fault = None
    for _ in range(2):
        expected = weights(policy)
        pushes(policy, engine, 1)
        assert fakes[0].has(expected, BF16)
        assert len(list(engine._files.folder.iterdir())) == 1
    assert num_changes(engine) == 2


def test_other_weights_than_were_announced_end_the_run(tmp_path: Path) -> None:
    policy = model()

    def wrong(fake: FakeVLLM, path: str, body: dict[str, Any]) -> None:
        if path == "/update_weights":
            body["update_info"]["digest"] = "0" * 64

    engine, (fake,) = served(policy, tmp_path)
    pushes(policy, engine, 1)
    fake.fault, before = wrong, {name: tensor.clone() for name, tensor in fake.base.model.named_parameters()}
    with pytest.raises(TrainingError, match="did not load .* holds other weights than were announced"):
        pushes(policy, engine, 1)
    assert fake.has(before, BF16)
    assert not fake.is_paused
