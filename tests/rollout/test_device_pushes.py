"""Weights through memory of the learner's device, with shared memory of the host in its place.

The worker's code is the real one, and so is the learner's; only the calls of CUDA's driver are `fake_driver`'s.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier, Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from builders import tiny_language_model, tiny_tokenizer
from fake_driver import FakeDriver
from fake_vllm import CUT, FakeVLLM, Fault, engine_on, fake_servers
from inside_vllm import Loading, share_device, worker_file
from proximo.errors import TrainingError
from proximo.http_client import UnansweredError
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.records import Prompt
from proximo.rollout.engine import fingerprint, push_weights
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.rollout.vllm import device_memory, server
from proximo.rollout.vllm.device_memory import DeviceMemory, PackedWeights
from proximo.rollout.vllm.engine import VLLMEngine

PROMPTS = [Prompt(id=f"p{n}", token_ids=tuple(range(5, 8 + n))) for n in range(3)]
KEY = RandomKey(seed=3, purpose="rollout", step=1)
HERE, ELSEWHERE = "here", "elsewhere"
"""Machines."""
NO_PEER_ACCESS = 217
GENERATE = "/inference/v1/generate"
CPU = torch.device("cpu")
OPEN = ExitStack()


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDriver]:
    """A device that is this machine's memory."""
    made = share_device(monkeypatch, tmp_path, host=HERE)
    monkeypatch.setattr(server, "FIRST_PAUSE_SECONDS", 0.01)
    with OPEN:
        yield made
    assert made.num_mapped == 0, "all memory was freed and closed"


def model(seed: int = 0) -> LanguageModel:
    return LanguageModel(tiny_language_model(seed=seed, initializer_range=0.2))


def served(
    policy: LanguageModel, *hosts: str, dtype: torch.dtype = torch.float32, fault: Fault | None = None
) -> tuple[VLLMEngine, list[FakeVLLM]]:
    fakes = OPEN.enter_context(fake_servers(model(seed=9) if policy.adapter_config is None else policy, len(hosts)))
    for fake, host in zip(fakes, hosts, strict=True):
        fake.host, fake.driver, fake.fault = host, device_memory.driver(), fault  # type: ignore[assignment]
    return engine_on(fakes, policy, OPEN, dtype=dtype), fakes


def weights(policy: LanguageModel) -> dict[str, Tensor]:
    return dict(policy.trainable_parameters())


def move(policy: LanguageModel) -> None:
    with torch.no_grad():
        for tensor in weights(policy).values():
            tensor.mul_(0.5).add_(0.01)


def copied(policy: LanguageModel) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weights(policy).items()}


def files_of(engine: VLLMEngine) -> list[str]:
    return sorted(path.name for path in engine._files.folder.rglob("*.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_server_on_the_learners_machine_loads_from_its_memory(dtype: torch.dtype, driver: FakeDriver) -> None:
    policy = model()
    engine, (fake,) = served(policy, HERE, dtype=dtype)
    for version in range(3):
        assert push_weights(engine, version, weights(policy))
        assert fake.has(weights(policy), dtype)
        move(policy)
    assert files_of(engine) == []
    assert fake.counts["/update_weights"] == 3
    assert Counter(driver.events) - Counter({"wait": 99}) == {"allocate": 1, "open": 3, "close": 3}
    opens = [place for place, event in enumerate(driver.events) if event == "open"]
    assert all(driver.events[place - 2 : place] == ["wait", "wait"] for place in opens), (
        "the learner's, and the server's"
    )
    assert all(driver.events[place + 1 : place + 3] == ["wait", "close"] for place in opens)


class Counted(TorchDispatchMode):
    """Counts operators that write a whole tensor, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_view = func.is_view or "reshape" in str(func)
        if isinstance(made, Tensor) and not is_view and made.numel() > 64 * 50:
            self.operators[str(func)] += 1
            self.num_bytes += made.nbytes + sum(each.nbytes for each in args[1:] if isinstance(each, Tensor))
        return made


def test_a_push_reads_each_number_once_and_writes_it_once() -> None:
    """The learner's part: 4 bytes are read and 2 written for each parameter, by one copy for each tensor."""
    large = {f"t{n}": torch.randn(80, 60) for n in range(5)}
    packed = PackedWeights(dict.fromkeys(large, (80, 60)), torch.bfloat16, CPU)
    with Counted() as counted:
        packed.fill(large.items())
    assert counted.operators == {"aten.copy_.default": 5}
    assert counted.num_bytes == 5 * 80 * 60 * (4 + 2)
    found = dict(packed.tensors())
    assert all(found[name].equal(tensor.bfloat16()) for name, tensor in large.items())
    assert [start for *_, start in packed.layout()] == [-(-80 * 60 * 2 // 256) * 256 * n for n in range(5)]
    assert fingerprint(found) == fingerprint(large, torch.bfloat16)
    packed.memory.close()


def test_a_restarted_server_gets_the_push_though_the_learner_has_moved_on(driver: FakeDriver) -> None:
    policy, seen = model(), Counter[str]()

    def restart(fake: FakeVLLM, path: str, body: dict[str, Any]) -> None:
        seen[path] += 1
        if path == GENERATE and seen[path] == 2:
            fake.restart()

    engine, (fake,) = served(policy, HERE, fault=restart)
    push_weights(engine, 1, weights(policy))
    own = LocalEngine(policy.frozen_copy(), tiny_tokenizer(), eos_token_ids=[2])
    own.load_weights(1, copied(policy))
    pushed, options = copied(policy), SamplingOptions(max_new_tokens=5)
    expected = own.generate(PROMPTS, num_samples=2, options=options, key=KEY)
    move(policy)
    found = engine.generate(PROMPTS, num_samples=2, options=options, key=KEY)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert fake.has(pushed)
    assert driver.events.count("allocate") == 1
    assert driver.events.count("open") == 2
    assert files_of(engine) == []


def test_a_server_on_another_machine_gets_files_and_is_asked_once(
    driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    policy = model()
    engine, (near, far) = served(policy, HERE, ELSEWHERE)
    for version in range(3):
        push_weights(engine, version, weights(policy))
        assert near.has(weights(policy))
        assert far.has(weights(policy))
        assert files_of(engine) == ["model-00000.safetensors"], "of this push alone"
        move(policy)
    assert driver.events.count("allocate") == 1
    assert far.counts["/init_weight_transfer_engine"] == 4
    (said,) = [each for each in caplog.messages if "through files" in each]
    assert f"{far.url} gets its weights through files" in said
    assert "that of a GPU on host here, the server is on elsewhere" in said
    far.restart()
    assert engine.holds() is None
    engine._reload(engine.servers[1], engine._last)  # type: ignore[arg-type]
    assert engine.holds() is not None


@pytest.mark.parametrize("reaches", [False, True])
def test_memory_that_no_server_can_open_is_given_back(
    reaches: bool, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is on another machine, or its device does not reach the learner's."""
    policy = model()
    engine, (far,) = served(policy, ELSEWHERE if reaches else HERE)
    if not reaches:
        monkeypatch.setattr(driver, "cuIpcOpenMemHandle_v2", lambda *_: NO_PEER_ACCESS)
    push_weights(engine, 1, weights(policy))
    assert far.has(weights(policy))
    assert driver.num_mapped == 0
    assert reaches or "cuIpcOpenMemHandle_v2 of the CUDA driver failed with status 217" in caplog.text
    move(policy)
    push_weights(engine, 2, weights(policy))
    assert far.has(weights(policy))
    assert driver.events.count("allocate") == 1


def test_a_device_without_room_or_a_driver_leaves_files(
    driver: FakeDriver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = model()
    driver.room = 1
    engine, (fake,) = served(policy, HERE)
    for version in range(2):
        push_weights(engine, version, weights(policy))
        assert fake.has(weights(policy))
        move(policy)
    assert driver.events.count("allocate") == 1, "it is not tried again"
    assert "cuMemAlloc_v2 of the CUDA driver failed with status 2" in caplog.text
    monkeypatch.setattr(driver, "room", 2**40)
    monkeypatch.setattr(driver, "cuIpcGetMemHandle", lambda *_: 801)
    with pytest.raises(OSError, match="cuIpcGetMemHandle of the CUDA driver failed with status 801"):
        DeviceMemory(CPU, 10)
    assert driver.events[-1] == "free"


def test_a_server_that_knows_files_only_gets_files(driver: FakeDriver) -> None:
    """One that was started by an earlier version."""

    def old(fake: FakeVLLM, path: str, body: dict[str, Any]) -> Any:
        return (500, "unexpected keyword") if path.startswith("/init_w") and body["init_info"] else None

    policy = model()
    engine, (fake,) = served(policy, HERE, fault=old)
    push_weights(engine, 1, weights(policy))
    assert fake.has(weights(policy))


def test_workers_of_one_server_refuse_together_and_the_last_one_alone_says_so(
    driver: FakeDriver, tmp_path: Path
) -> None:
    """vLLM reads their replies in order, up to the first failure: a later one would end its next call."""
    memory, barrier, lock = DeviceMemory(CPU, 64), Barrier(2, timeout=60), Lock()
    total = torch.zeros((), dtype=torch.int64)

    def allreduce(each: list[Tensor]) -> Any:
        with lock:
            total.add_(each[0])
        barrier.wait()
        each[0].copy_(total)
        barrier.wait()
        total.zero_()
        barrier.wait()
        return SimpleNamespace(wait=lambda: None)

    def worker(rank: int) -> Any:
        code = worker_file()
        group = SimpleNamespace(allreduce=allreduce)
        code.get_tp_group = lambda: SimpleNamespace(world_size=2, is_last_rank=rank == 1, cpu_group=group)
        code.host_of, code.driver = lambda _: (HERE, ELSEWHERE)[rank], lambda: driver
        made = code.Transfer()
        made.device = CPU
        return made

    workers = [worker(rank) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first, last = [pool.submit(each.init, memory.as_sent()) for each in workers]
        assert first.result() is None
        with pytest.raises(ValueError, match="that of a GPU on host here, the server is on elsewhere"):
            last.result()
        assert driver.num_mapped == 1, "what the first one opened is closed"
        folder = {"digest": "none", "path": str(tmp_path / "none")}
        first, last = [pool.submit(each.update, folder) for each in workers]
        assert first.result() is None
        with pytest.raises(ValueError, match="holds other weights than were announced"):
            last.result()
        layers = nn.Linear(2, 2)
        save_file({"layers.none": torch.zeros(1)}, tmp_path / "model-0.safetensors", {"tensors_of_model": "1"})
        given = {"digest": fingerprint({"layers.none": torch.zeros(1)}), "path": str(tmp_path)}
        for each in workers:
            each.model, each.model_config = Loading(layers), None
        first, last = [pool.submit(each.update, given) for each in workers]
        assert first.result() is None
        with pytest.raises(ValueError, match=r"no place for layers\.none"):
            last.result()
    memory.close()


def test_other_numbers_than_were_announced_end_the_run_and_are_not_loaded(driver: FakeDriver) -> None:
    policy = model()

    def overwrite(fake: FakeVLLM, path: str, body: dict[str, Any]) -> None:
        if path == "/update_weights" and fake.counts[path] > 1:
            engine._transfer._packed.memory.bytes[:64].zero_()  # type: ignore[union-attr]

    engine, (fake,) = served(policy, HERE, fault=overwrite)
    push_weights(engine, 1, weights(policy))
    before = copied(policy)
    move(policy)
    with pytest.raises(TrainingError, match="version 2: status 500 .* holds other weights than were announced"):
        push_weights(engine, 2, weights(policy))
    assert fake.has(before)
    assert not fake.is_paused


def test_a_connection_that_is_cut_does_not_turn_a_server_to_files(driver: FakeDriver) -> None:
    def cut(fake: FakeVLLM, path: str, body: dict[str, Any]) -> Any:
        return CUT if path == "/update_weights" and fake.counts[path] == 1 else None

    policy = model()
    engine, (fake,) = served(policy, HERE, fault=cut)
    push_weights(engine, 1, weights(policy))
    assert fake.has(weights(policy))
    assert files_of(engine) == []


def test_tensors_of_other_shapes_get_other_room(driver: FakeDriver) -> None:
    policy = model()
    engine, (fake,) = served(policy, HERE)
    some = dict(list(weights(policy).items())[:3])
    push_weights(engine, 1, some)
    push_weights(engine, 2, weights(policy))
    assert fake.has(weights(policy))
    assert [each for each in driver.events if each in ("allocate", "free")] == ["allocate", "free", "allocate"]


def test_an_adapter_and_tensors_of_their_own_types_travel_as_files(driver: FakeDriver) -> None:
    adapted = model().with_adapter(LoRAOptions(rank=2))
    engine, (fake,) = served(adapted, HERE)
    push_weights(engine, 1, weights(adapted))
    assert len(fake.adapters) == 1
    plain = model()
    engine, (fake,) = served(plain, HERE)
    engine._transfer._by_memory.clear()
    push_weights(engine, 1, weights(plain))
    assert fake.has(weights(plain))
    assert driver.events == []


def test_an_engine_on_a_device_that_failed_is_closed(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = model()
    engine, _ = served(policy, HERE)
    push_weights(engine, 1, weights(policy))
    free = driver.cuMemFree_v2
    monkeypatch.setattr(driver, "cuMemFree_v2", lambda address: free(address) or 700)
    engine.close()
    assert not engine._files.folder.exists()


def test_memory_that_a_server_may_still_read_is_not_freed(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = model()
    engine, _ = served(policy, HERE)
    push_weights(engine, 1, weights(policy))

    def too_late(*_: Any, **__: Any) -> None:
        raise UnansweredError("no reply after 600 s", timed_out=True)

    monkeypatch.setattr(engine.servers[0], "load_weights", too_late)
    with pytest.raises(UnansweredError):
        engine._transfer.give(engine.servers[0], name="1", digest="")
    engine.close()
    assert "free" not in driver.events
    monkeypatch.setattr(engine.servers[0], "has_ended", lambda: True)
    engine.close()
    assert "free" in driver.events


def test_without_a_device_nothing_is_asked_of_a_driver(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    monkeypatch.setattr(device_memory, "SHAREABLE", "cuda")
    policy = model()
    engine, (fake,) = served(policy, HERE)
    push_weights(engine, 1, weights(policy))
    assert fake.has(weights(policy))
    assert driver.events == []
