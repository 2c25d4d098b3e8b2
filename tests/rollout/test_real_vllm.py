"""vLLM itself: `make test-vllm` runs this against the environment that `proximo engine install` made.

PROXIMO_TEST_VLLM names the folder of the environment. One server of each architecture, on a CPU in float32.
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from builders import tiny_language_model, tiny_tokenizer
from inside_vllm import share_device
from proximo.checkpoint.run_folder import open_run
from proximo.checkpoint.store import CheckpointStore
from proximo.cli import main
from proximo.config.engine import VLLMEngineConfig
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.packing import pack_responses
from proximo.models.pretrained.saving import save_pretrained
from proximo.models.sharing import base_alone
from proximo.records import Finish, Prompt, Response
from proximo.rollout.engine import Holding, fingerprint, push_weights
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.rollout.vllm import pushed_weights
from proximo.rollout.vllm.engine import VLLMEngine
from proximo.rollout.vllm.scoring import served_logprobs
from proximo.run.make.engine import Sampling, engine_of, make_servers

ENVIRONMENT = os.environ.get("PROXIMO_TEST_VLLM")
pytestmark = pytest.mark.skipif(ENVIRONMENT is None, reason="PROXIMO_TEST_VLLM names no environment of vLLM")
ON_A_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
PROMPTS = [Prompt(id=f"p{n}", token_ids=tuple(range(5, 8 + 9 * n))) for n in range(4)]
KEY = RandomKey(seed=3, purpose="rollout", step=1)
OPTIONS = SamplingOptions(max_new_tokens=12)
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
}
# vLLM's attention on a CPU takes heads of 32 numbers and more.
WIDTH = {"hidden_size": 64, "initializer_range": 0.2}
NUM_PUSHES = 20


def serve(policy: LanguageModel, opened: ExitStack, *, path: str | None = None, **others: Any) -> VLLMEngine:
    options = {"variables": ON_A_CPU, "arguments": ("--enforce-eager",)} | others
    config = VLLMEngineConfig(kind="vllm", environment=ENVIRONMENT, **options)
    sampling = Sampling(temperature=1.0, max_tokens=128)
    servers = make_servers(config, policy, tiny_tokenizer(), sampling, path=path, started=opened)
    engine = engine_of(servers, policy, tiny_tokenizer())
    assert isinstance(engine, VLLMEngine)
    engine.options = replace(engine.options, max_logprob_error=1e-4)
    return engine


@pytest.fixture(scope="module", params=SHAPES)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[LanguageModel, VLLMEngine]]:
    policy = LanguageModel(tiny_language_model(request.param, **WIDTH, **SHAPES[request.param]))
    with ExitStack() as opened:
        yield policy, serve(policy, opened)


def move(policy: LanguageModel, seed: int, *, share: float = 1.0) -> dict[str, Tensor]:
    """Change all weights or a share of them a little, as a step does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, tensor in policy.trainable_parameters():
            is_moved = torch.rand(tensor.shape, generator=generator) < share
            tensor.add_(0.02 * torch.randn(tensor.shape, generator=generator) * is_moved)
    return dict(policy.trainable_parameters())


def learners(policy: LanguageModel, responses: list[Response]) -> Tensor:
    packed = pack_responses([each.prompt.token_ids for each in responses], [each.token_ids for each in responses])
    return policy.response_logprobs(packed).logprobs.detach()


def sampled(responses: list[Response]) -> Tensor:
    return torch.cat([each.logprobs for each in responses])


def test_log_probs_are_the_learners_after_every_push(served: tuple[LanguageModel, VLLMEngine]) -> None:
    policy, engine = served
    largest = []
    for version in range(NUM_PUSHES):
        tensors = move(policy, version)
        assert push_weights(engine, version, tensors)
        assert engine.holds() == Holding(version=version, fingerprint=fingerprint(tensors))
        found = engine.generate(PROMPTS, num_samples=2, options=OPTIONS, key=KEY)
        assert {each.policy_version for each in found} == {version}
        largest.append(float((sampled(found) - learners(policy, found)).abs().max()))
    print(f"largest difference after each of {NUM_PUSHES} pushes: {max(largest):.2g}")
    assert max(largest) < 1e-4


def test_greedy_tokens_are_the_built_in_engines_up_to_near_ties(served: tuple[LanguageModel, VLLMEngine]) -> None:
    policy, engine = served
    tensors = move(policy, 100)
    push_weights(engine, 100, tensors)
    own = LocalEngine(policy, tiny_tokenizer(), eos_token_ids=[2])
    own.load_weights(100, tensors)
    options = SamplingOptions(max_new_tokens=40, greedy=True)
    ours, theirs = (each.generate(PROMPTS, num_samples=1, options=options, key=KEY) for each in (own, engine))
    for mine, other in zip(ours, theirs, strict=True):
        pairs = enumerate(zip(mine.token_ids, other.token_ids, strict=False))
        place = next((place for place, (a, b) in pairs if a != b), None)
        if place is not None:  # both tokens were nearly the most likely
            assert abs(float(mine.logprobs[place] - other.logprobs[place])) < 1e-4
    differ = sum(mine.token_ids != other.token_ids for mine, other in zip(ours, theirs, strict=True))
    print(f"{differ} of {len(ours)} greedy responses differ, at a near-tie")


def test_limits_and_ends_are_ours(served: tuple[LanguageModel, VLLMEngine]) -> None:
    policy, engine = served
    push_weights(engine, 101, move(policy, 101))

    def draw(**options: Any) -> list[Response]:
        return engine.generate(PROMPTS, num_samples=4, options=SamplingOptions(**options), key=KEY)

    plain = draw(max_new_tokens=30)
    long = [each.token_ids for each in plain if len(each.token_ids) > 5]  # some end at once
    assert len(set(long)) == len(long) > 4, "each response has a seed of its own"
    assert [each.token_ids for each in draw(max_new_tokens=30)] == [each.token_ids for each in plain]
    for each in plain:
        assert each.finish is (Finish.EOS if each.token_ids[-1] == 2 else Finish.LENGTH)
        assert len(each.token_ids) == 30 or each.finish is Finish.EOS
    for each in draw(max_new_tokens=30, stop_token_ids=(7, 8, 9)):
        assert not {7, 8, 9} & set(each.token_ids[:-1])
        assert (each.finish is Finish.STOP) == (each.token_ids[-1] in (7, 8, 9))
    for each in draw(max_new_tokens=30, stop_strings=("a", "bc")):
        assert "a" not in each.text
        assert "bc" not in each.text
    assert all(len(each.token_ids) >= 5 for each in draw(max_new_tokens=9, min_new_tokens=5))
    assert {len(each.token_ids) for each in draw(max_new_tokens=9, random_limit_min=2)} <= set(range(1, 10))
    nucleus = draw(max_new_tokens=9, top_k=2)
    assert (sampled(nucleus) - learners(policy, nucleus)).abs().max() < 1e-4


def test_weights_that_are_loaded_while_it_samples_take_effect_at_the_next_token(
    served: tuple[LanguageModel, VLLMEngine],
) -> None:
    """Responses keep their tokens, and no key or value of the weights before is used: log-probs are the learner's."""
    policy, engine = served
    options, number = SamplingOptions(max_new_tokens=60, min_new_tokens=60), 200
    push_weights(engine, number, move(policy, number))
    num_mixed = 0
    for _ in range(3):
        models = {number: policy.frozen_copy()}
        found: list[Response] = []
        asking = Thread(
            target=lambda into=found: into.extend(engine.generate(PROMPTS, num_samples=32, options=options, key=KEY))
        )
        asking.start()
        for _ in range(2):
            time.sleep(0.5)
            number += 1
            push_weights(engine, number, move(policy, number))
            models[number] = policy.frozen_copy()
        asking.join(120)
        assert len(found) == 128
        versions = torch.tensor([each.token_versions or (each.policy_version,) * 60 for each in found]).flatten()
        assert set(versions.tolist()) <= set(models)
        num_mixed += sum(each.token_versions is not None for each in found)
        for version, model in models.items():
            errors = (sampled(found) - learners(model, found)).abs()[versions == version]
            assert not len(errors) or errors.max() < 1e-4
    print(f"{num_mixed} of {3 * 128} responses have tokens of several versions")
    assert num_mixed


def test_calls_of_an_adapter_end_with_theirs_while_the_next_one_is_loaded(tmp_path: Path) -> None:
    base = tiny_language_model("qwen2", **WIDTH)
    save_pretrained(base, tmp_path / "base")
    policy = LanguageModel(base).with_adapter(LoRAOptions(rank=4, alpha=8.0))
    options = SamplingOptions(max_new_tokens=60, min_new_tokens=60)
    with ExitStack() as opened:
        engine = serve(policy, opened, path=str(tmp_path / "base"))
        push_weights(engine, 0, move(policy, 0))
        before, found = policy.frozen_copy(), list[Response]()
        asking = Thread(target=lambda: found.extend(engine.generate(PROMPTS, num_samples=16, options=options, key=KEY)))
        asking.start()
        time.sleep(0.5)
        push_weights(engine, 1, move(policy, 1))
        after = engine.generate(PROMPTS, num_samples=2, options=OPTIONS, key=KEY)
        asking.join(120)
        assert {each.policy_version for each in found} == {0}
        assert (sampled(found) - learners(before, found)).abs().max() < 1e-4
        assert (sampled(after) - learners(policy, after)).abs().max() < 1e-4


def test_of_an_adapter_the_adapter_travels(tmp_path: Path) -> None:
    base = tiny_language_model("qwen2", **WIDTH)
    save_pretrained(base, tmp_path / "base")
    policy = LanguageModel(base).with_adapter(LoRAOptions(rank=4, alpha=8.0))
    with ExitStack() as opened:
        engine = serve(policy, opened, path=str(tmp_path / "base"))
        for version in range(5):
            push_weights(engine, version, move(policy, version))
            found = engine.generate(PROMPTS, num_samples=2, options=OPTIONS, key=KEY)
            assert (sampled(found) - learners(policy, found)).abs().max() < 1e-4
        assert engine.servers[0].adapters() == [engine._last.name]  # type: ignore[union-attr]
        given = served_logprobs(engine.servers, [part for each in found for part in each.sequences])
    assert (given - learners(base_alone(policy), found)).abs().max() < 1e-4, "as the reference on servers is asked"


def checks_weights(engine: VLLMEngine, action: str, **given: Any) -> Any:
    """vLLM's own digests of the numbers that it has loaded, or whether they are those of `baseline`."""
    return engine.servers[0]._ask("POST", "/weight_checker", {"action": action, **given})


def check_against_files(policy: LanguageModel, engine: VLLMEngine, version: int, **few: Any) -> None:
    """Other pushes follow, each compared with the learner; the last one is loaded again from whole tensors in files."""
    for number in range(version, version + 4):
        tensors = move(policy, number, **few)
        push_weights(engine, number, tensors)
        found = engine.generate(PROMPTS, num_samples=2, options=OPTIONS, key=KEY)
        assert (sampled(found) - learners(policy, found)).abs().max() < 1e-4
    loaded = checks_weights(engine, "checksum")["checksums"]
    engine._transfer._by_memory.clear()
    engine._transfer.settle()
    engine._files.clear()
    engine.load_weights(version + 4, tensors)
    assert engine._files.digests_of_changes == []
    assert checks_weights(engine, "compare", baseline=loaded) == {"match": True, "mismatches": []}
    push_weights(engine, version + 5, move(policy, version + 5, **few))
    assert not checks_weights(engine, "compare", baseline=loaded)["match"]


@pytest.mark.parametrize(("architecture", "workers"), [("llama", 1), ("qwen2", 1), ("llama", 2)])
def test_pushes_of_changes_load_the_same_numbers_as_whole_ones(
    architecture: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a device, which is offered first, all workers of the server refuse."""
    monkeypatch.setattr(pushed_weights, "IN_MEMORY", tmp_path / "none")
    driver = share_device(monkeypatch, tmp_path, host="here")
    policy = LanguageModel(tiny_language_model(architecture, **WIDTH, **SHAPES[architecture]))
    with ExitStack() as opened:
        arguments = ("--enforce-eager", f"--tensor-parallel-size={workers}")
        engine = serve(policy, opened, transfer_folder=str(tmp_path), arguments=arguments)
        push_weights(engine, 0, move(policy, 0))
        assert [each for each in driver.events if each != "wait"] == ["allocate", "free"]
        check_against_files(policy, engine, 1, share=0.02)
        assert len(engine._files.digests_of_changes) == 1


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_pushes_through_memory_load_the_same_numbers_as_files(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that two processes open stands in for a device's. The server closes it after each push."""
    share_device(monkeypatch, tmp_path, host="here")
    policy = LanguageModel(tiny_language_model(architecture, **WIDTH, **SHAPES[architecture]))
    tests = str(Path(__file__).parents[1])
    with ExitStack() as opened:
        engine = serve(
            policy,
            opened,
            variables=ON_A_CPU | {"PYTHONPATH": tests, "PROXIMO_TEST_MEMORY": str(tmp_path)},
            arguments=("--enforce-eager", "--worker-extension-cls", "fake_device_worker.Worker"),
        )
        push_weights(engine, 0, move(policy, 0))
        assert engine._transfer._packed is not None
        assert engine._files.last is None
        check_against_files(policy, engine, 1)


IN_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
asked = json.loads(sys.argv[1])
model = LLM(asked["folder"], dtype="float32", enforce_eager=True, max_model_len=64, generation_config="vllm")
options = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
(answer,) = model.generate([{"prompt_token_ids": asked["prompt"]}], options)
tokens = answer.outputs[0].token_ids
logprobs = [each[token].logprob for token, each in zip(tokens, answer.outputs[0].logprobs)]
print("found", json.dumps([list(tokens), logprobs]))
"""


def test_an_exported_folder_loads_in_vllm_alone(tmp_path: Path) -> None:
    """Without anything of Proximo in vLLM's process; an adapter is merged first."""
    base = tmp_path / "base"
    save_pretrained(tiny_language_model(**WIDTH), base)
    tiny_tokenizer().save_pretrained(base)
    policy = LanguageModel(AutoModelForCausalLM.from_pretrained(base)).with_adapter(
        LoRAOptions(rank=2, alpha=4, seed=1)
    )
    move(policy, 1)
    with open_run(tmp_path / "run") as run:
        writers = {"policy": lambda path: (save_pretrained(policy.model, path), tiny_tokenizer().save_pretrained(path))}
        CheckpointStore(run.path / "checkpoints").save(1, writers, {})
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--merge"]) == 0
    prompt = [5, 6, 7, 8]
    asked = json.dumps({"folder": str(tmp_path / "out"), "prompt": prompt})
    assert ENVIRONMENT is not None
    ran = subprocess.run(
        [str(Path(ENVIRONMENT) / "bin" / "python"), "-c", IN_VLLM, asked],
        env={**os.environ, **ON_A_CPU, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    tokens, logprobs = json.loads(ran.stdout.rpartition("found ")[2])
    packed = pack_responses([tuple(prompt)], [tuple(tokens)])
    own = policy.response_logprobs(packed).logprobs.detach()
    difference = float((torch.tensor(logprobs) - own).abs().max())
    print(f"an exported folder in vLLM: largest difference of a log-prob {difference:.2g}")
    assert difference < 1e-4
