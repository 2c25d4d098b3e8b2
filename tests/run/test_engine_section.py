"""Every key of the section `engine` has an effect: on the command line of a server, on its client, or on the engine."""

import json
import socket
import tempfile
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from builders import tiny_language_model, tiny_tokenizer
from fake_vllm import GENERATE, FakeVLLM, fake_environment, fake_servers
from proximo.cli.program import main
from proximo.config.engine import LocalEngineConfig, VLLMEngineConfig
from proximo.errors import ConfigError
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.precision.placement import Precision
from proximo.models.pretrained.vocabulary import embedding_rows, resize_vocabulary
from proximo.rollout.vllm.process import ServerSpec
from proximo.rollout.vllm.server import VLLMServer
from proximo.run.make import engine as built
from proximo.run.make.engine import EngineServers, Sampling, engine_of, make_servers
from tiny_runs import make_inputs, recipe_of

SAMPLING = Sampling(temperature=1.0, max_tokens=40)


class Started:
    """Stands for a process that runs."""

    specs: ClassVar[list[ServerSpec]] = []
    waited: ClassVar[list[float]] = []

    def __init__(self, spec: ServerSpec, *, log: Path, folder: Path) -> None:
        assert log.parent == folder, "outside of a run, what it leaves behind is removed with it"
        assert not folder.stat().st_mode & 0o077, "no other user may reach a server's socket"
        self.specs.append(spec)
        self.url = f"http://127.0.0.1:{1000 + len(self.specs)}"
        self.restart_if_ended = self.has_ended

    def wait_until_ready(self, server: Any, *, seconds: float) -> None:
        self.waited.append(seconds)

    def has_ended(self) -> bool:
        return False

    def last_words(self) -> str:
        return "it runs"

    def close(self) -> None:
        """Nothing runs."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> type[Started]:
    monkeypatch.setattr(Started, "specs", [])
    monkeypatch.setattr(Started, "waited", [])
    monkeypatch.setattr(built, "ServerProcess", Started)
    return Started


def policy(**options: Any) -> LanguageModel:
    return LanguageModel(tiny_language_model(), **options)


def made(
    config: VLLMEngineConfig, model: LanguageModel, opened: ExitStack, **options: Any
) -> tuple[EngineServers, Any]:
    sampling = options.pop("sampling", SAMPLING)
    servers = make_servers(config, model, tiny_tokenizer(), sampling, path=options.get("path"), started=opened)
    assert servers is not None
    return servers, engine_of(servers, model, tiny_tokenizer())


def test_every_key_of_the_section_reaches_servers_and_engine(
    started: type[Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = fake_environment(tmp_path / "environment")
    config = VLLMEngineConfig(
        kind="vllm",
        replicas=2,
        environment=str(environment),
        dtype="bfloat16",
        arguments=("--seed=3",),
        variables={"ONE": "1"},
        transfer_folder=str(tmp_path),
        max_concurrent_requests=7,
        request_seconds=11.0,
        start_seconds=13.0,
    )
    with ExitStack() as opened:
        servers, engine = made(config, policy(), opened)
        assert len(started.specs) == len(servers.servers) == 2
        spec = started.specs[0]
        command = spec.command()
        assert command[0] == str(environment / "bin" / "python")
        assert command[command.index("--dtype") + 1] == "bfloat16"
        assert command[command.index("--max-model-len") + 1] == "40"
        assert "--no-enable-chunked-prefill" in command, "vLLM ends on a CPU if it divides a prompt"
        assert command[command.index("--logprobs-mode") + 1] == "raw_logprobs"
        assert command[command.index("--load-format") + 1] == "dummy"
        assert command[-1] == "--seed=3"
        assert spec.environment == {"ONE": "1"}, "no devices on a CPU"
        assert started.waited == [13.0, 13.0]
        limits = servers.servers[1].limits
        assert (limits.max_concurrent_requests, limits.request_seconds) == (7, 11.0)
        assert (engine.max_logprob_error, engine.options.dtype) == (0.5, torch.bfloat16)
        assert engine._files.folder.parent == tmp_path
    assert not list(tmp_path.glob("proximo-weights-*"))
    monkeypatch.setenv("TOKEN", "secret")
    with ExitStack() as opened:
        (fake,) = opened.enter_context(fake_servers(policy()))
        config = VLLMEngineConfig(kind="vllm", addresses=(f"{fake.url}/",), token_env="TOKEN")
        servers, _ = made(config, policy(), opened)
        assert [server.url for server in servers.servers] == [fake.url]
        assert servers.servers[0]._client._client.headers["Authorization"] == "Bearer secret"
    assert make_servers(LocalEngineConfig(), policy(), tiny_tokenizer(), SAMPLING, path=None, started=opened) is None


def test_what_is_left_out_follows_the_run(started: type[Started], tmp_path: Path) -> None:
    """Type from the precision, log-probs from the temperature, the model from what is pushed."""
    config = VLLMEngineConfig(kind="vllm", environment=str(fake_environment(tmp_path / "environment")))
    with ExitStack() as opened:
        warm = Sampling(temperature=0.7, max_tokens=40)
        made(config, policy(precision=Precision.BF16), opened, sampling=warm)
        made(config, policy(), opened, path="owner/model")
        base = policy()
        base.base.save_pretrained(tmp_path / "base")
        made(config, base.with_adapter(LoRAOptions(rank=3)), opened, path=str(tmp_path / "base"))
        cut = Sampling(temperature=1.0, max_tokens=40, leaves_out_tokens=True)
        made(config, policy(), opened, sampling=cut)
        on_device = EngineServers(config, dtype="float32")
        opened.callback(on_device.close)
        on_device.start(policy(), tiny_tokenizer(), cut, path=None, device=torch.device("cuda"), logs=None)
        bf16, whole, adapter, on_cpu, on_gpu = (spec.command() for spec in started.specs)
        assert "--return-sampling-mask" not in on_cpu, "vLLM has masks on GPUs only"
        assert on_cpu[on_cpu.index("--logprobs-mode") + 1] == "raw_logprobs"
        assert "--return-sampling-mask" in on_gpu
        assert on_gpu[on_gpu.index("--logprobs-mode") + 1] == "processed_logprobs", "masks come with no others"
        assert bf16[bf16.index("--dtype") + 1] == "bfloat16"
        assert bf16[bf16.index("--logprobs-mode") + 1] == "processed_logprobs"
        assert whole[whole.index("--dtype") + 1] == "float32"
        model = Path(whole[whole.index("--model") + 1])
        assert json.loads((model / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
        assert "--load-format" not in adapter
        assert adapter[adapter.index("--model") + 1] == str(tmp_path / "base")
        assert adapter[adapter.index("--max-lora-rank") + 1] == "8", "vLLM knows some ranks alone"


def test_servers_sleep_on_a_gpu_only(started: type[Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = str(fake_environment(tmp_path / "environment"))
    config = VLLMEngineConfig(kind="vllm", environment=environment, sleep=True)
    with ExitStack() as opened, pytest.raises(ConfigError, match="engine.sleep frees the memory of a GPU"):
        made(config, policy(), opened)
    monkeypatch.setattr(LanguageModel, "device", property(lambda _: torch.device("cuda")))
    monkeypatch.setattr(VLLMServer, "wake", lambda _: None)
    with ExitStack() as opened:
        _, engine = made(config, policy(), opened)
        assert engine.options.sleeps
        assert "--enable-sleep-mode" in started.specs[0].command()
        assert not started.specs[0].environment, "one server sees all devices"


@pytest.mark.parametrize(
    ("visible", "variables", "arguments", "groups"),
    [
        (None, {}, [], ["0,1,2,3", "4,5,6,7"]),
        ("0,1,2,3,4,5", {"CUDA_VISIBLE_DEVICES": "4, 5"}, [], ["4", "5"]),
        ("3,1,-1,2", {}, [], ["3", "1"]),
        ("GPU-8932f937,GPU-72f6e0d9", {}, ["-tp=1"], ["GPU-8932f937", "GPU-72f6e0d9"]),
        (None, {}, ["--tensor-parallel-size", "2", "--pipeline_parallel_size=2"], ["0,1,2,3", "4,5,6,7"]),
        (None, {}, ["-tp", "4", "-dp=2"], "devices 0,1,2,3,4,5,6,7 into equal groups of at least 8"),
        ("1,2,3", {}, [], "2 servers cannot divide the devices 1,2,3 into equal groups of at least 1: change replicas"),
        ("", {}, [], r"devices \(none\) into"),
    ],
)
def test_each_server_gets_devices_of_its_own(
    *,
    visible: str | None,
    variables: dict[str, str],
    arguments: list[str],
    groups: list[str] | str,
    started: type[Started],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    model = policy()  # before a device is said to be there
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    config = VLLMEngineConfig(
        kind="vllm",
        replicas=2,
        environment=str(fake_environment(tmp_path / "environment")),
        variables={"ONE": "1", **variables},
        arguments=tuple(arguments),
    )
    if isinstance(groups, str):
        with pytest.raises(ConfigError, match=groups):
            built.check_engine(config, torch.device("cuda"))
        return
    built.check_engine(config, torch.device("cuda"))
    monkeypatch.setattr(LanguageModel, "device", property(lambda _: torch.device("cuda")))
    with ExitStack() as opened:
        made(config, model, opened)
    given = [{"CUDA_VISIBLE_DEVICES": group, "ONE": "1"} for group in groups]
    assert [spec.environment for spec in started.specs] == [variables | each for each in given]


@pytest.mark.parametrize("change", ["tokens", "adapter", "config", None])
def test_a_server_of_an_adapter_has_what_the_policy_starts_from(
    change: str | None, started: type[Started], tmp_path: Path
) -> None:
    """What lies at the policy's path may be another model: without tokens that were added, or an adapter itself."""
    config = VLLMEngineConfig(kind="vllm", environment=str(fake_environment(tmp_path / "environment")))
    place, start = tmp_path / "place", policy()
    start.base.save_pretrained(place)
    if change == "tokens":
        resize_vocabulary(start.base, embedding_rows(start.base) + 3)
    if change == "adapter":
        (place / "config.json").unlink()
        (place / "model.safetensors").unlink()
        (place / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "base_model_name_or_path": "owner/model"})
        )
    wanted = {name: tensor.clone() for name, tensor in start.base.state_dict().items()}
    with ExitStack() as opened:
        path = None if change == "config" else str(place)
        made(config, start.with_adapter(LoRAOptions(rank=3)), opened, path=path)
        command = started.specs[0].command()
        given = command[command.index("--model") + 1]
        assert (given == str(place)) == (change is None)
        found = type(start.base).from_pretrained(given, dtype="float32").state_dict()
        torch.testing.assert_close(dict(found), wanted, atol=0, rtol=0)


def test_a_server_has_the_revision_that_the_policy_was_loaded_from_and_the_adapters_that_responses_began_with(
    started: type[Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = VLLMEngineConfig(kind="vllm", environment=str(fake_environment(tmp_path / "environment")))
    start, ahead = policy(), Sampling(temperature=1.0, max_tokens=40, staleness=3)
    start.base.config._commit_hash = "0123abc"
    monkeypatch.setattr(built, "_holds_start_of", lambda *_: True)
    with ExitStack() as opened:
        made(config, start.with_adapter(LoRAOptions(rank=3)), opened, path="owner/model", sampling=ahead)
        command = started.specs[0].command()
        for key, value in {"--model": "owner/model", "--revision": "0123abc", "--max-loras": "5"}.items():
            assert command[command.index(key) + 1] == value


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (404, "refuses with status 404: is it a vLLM server that `proximo engine serve` started"),
        (401, "refuses with status 401: it requires a token: set engine.token_env"),
        (b"<html>", "cannot be used: invalid reply to /weight_info: not JSON"),
        (b"{}", "cannot be used: invalid reply: no weight version"),
    ],
)
def test_what_answers_but_is_no_server_of_ours_is_refused(reply: Any, message: str) -> None:
    """Another service, or vLLM without the interface for weights. `check_engine` runs before models are loaded."""

    def fault(fake: FakeVLLM, path: str, body: dict[str, Any]) -> Any:
        return reply if path == "/weight_info" else None

    with fake_servers(policy(), fault=fault) as (fake,), pytest.raises(ConfigError) as caught:
        built.check_engine(VLLMEngineConfig(kind="vllm", addresses=(fake.url,)))
    assert str(caught.value).startswith(f"engine.addresses: {fake.url} {message}")


@pytest.mark.parametrize(("max_tokens", "is_taken"), [(128, True), (129, False)])
def test_a_server_for_shorter_responses_than_the_runs_is_refused(*, max_tokens: int, is_taken: bool) -> None:
    sampling = Sampling(temperature=1.0, max_tokens=max_tokens)
    with ExitStack() as opened:
        (fake,) = opened.enter_context(fake_servers(policy()))
        config = VLLMEngineConfig(kind="vllm", addresses=(fake.url,))
        built.check_engine(config)
        message = rf"{fake.url} \(engine\.addresses\) takes up to 128 tokens, .* asks it for 129: .*max-model-len 129"
        with nullcontext() if is_taken else pytest.raises(ConfigError, match=message):
            made(config, policy(), opened, sampling=sampling)


def test_a_preview_and_a_plan_say_who_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = {"kind": "vllm", "addresses": ["http://a:8000", "http://b:8000"]}
    path = tmp_path / "ppo.json"
    path.write_text(json.dumps(recipe_of("ppo", make_inputs(tmp_path)) | {"engine": engine}))
    assert main(["ppo", str(path), "--dry-run"]) == 0
    assert "vLLM at http://a:8000, http://b:8000" in capsys.readouterr().out
    assert main(["plan", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "generate" not in shown
    assert "policy_logprobs" in shown
    assert "vLLM servers sample the responses: their time and memory are not counted" in shown
    assert "where a GPU's memory carries a push, it keeps 0.00 GiB of the learner's" in shown


def test_an_evaluation_samples_with_the_engine_of_the_run_or_with_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = recipe_of("ppo", make_inputs(tmp_path))
    model = tiny_language_model()
    model.save_pretrained("policy")
    tiny_tokenizer().save_pretrained("policy")
    evaluate = ["evaluate", str(recipe["run"]["folder"]), "--greedy"]
    with fake_servers(LanguageModel(model)) as (server,):
        changes = {"model": {"path": "policy"}, "engine": {"kind": "vllm", "addresses": [server.url]}}
        path = tmp_path / "ppo.json"
        path.write_text(json.dumps(recipe | changes))
        assert main(["ppo", str(path), "--quiet"]) == 0
        server.restart()
        before = server.counts[GENERATE]
        assert main([*evaluate, "--output=theirs.jsonl"]) == 0
        asked = server.counts[GENERATE] - before
        assert asked > 0
        assert main([*evaluate, "--engine=local", "--output=ours.jsonl"]) == 0
        assert server.counts[GENERATE] == before + asked
    theirs, ours = (
        [json.loads(line)["response"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("theirs.jsonl", "ours.jsonl")
    )
    assert theirs == ours
    assert main(evaluate) == 2
    assert "no vLLM server answers" in capsys.readouterr().err


@pytest.mark.parametrize(("length", "is_taken"), [(107, True), (108, False)])
def test_a_temporary_folder_whose_sockets_no_system_takes_is_refused(
    *, length: int, is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = fake_environment(tmp_path / "environment")
    refused = pytest.raises(ConfigError, match="set TMPDIR to a shorter one")
    too_long = pytest.raises(OSError, match="too long")
    with tempfile.TemporaryDirectory(dir="/tmp") as short, socket.socket(socket.AF_UNIX) as listening:
        place = Path(short, "x" * (length - len(f"{short}//proximo-vllm-12345678/server-999.sock")))
        place.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        with nullcontext() if is_taken else refused:
            built.check_engine(VLLMEngineConfig(kind="vllm", environment=str(environment)))
        with nullcontext() if is_taken else too_long:
            listening.bind(str(Path(tempfile.mkdtemp(prefix="proximo-vllm-"), "server-999.sock")))
