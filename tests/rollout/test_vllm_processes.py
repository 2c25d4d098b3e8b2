"""vLLM servers that a run starts: they end with it however it ends, and a start that fails says why."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_vllm import forked_environment
from proximo.checkpoint.run_folder import METRICS
from proximo.cli.program import main
from proximo.config.engine import VLLMEngineConfig
from proximo.distributed import launch
from proximo.errors import ConfigError, TrainingError, UserError
from proximo.ppo import from_recipe
from proximo.rollout.vllm import dispatch, server
from proximo.rollout.vllm import process as process_module
from proximo.rollout.vllm.process import MAX_RESTARTS, ServerProcess, ServerSpec, install
from proximo.rollout.vllm.server import VLLMServer
from proximo.run.make import engine as engine_section
from tiny_runs import changed, make_inputs, recipe_of
from waiting import LATEST_SECONDS, wait_until


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dispatch, server):
        monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.05)
        monkeypatch.setattr(module, "LONGEST_PAUSE_SECONDS", 0.5)
    monkeypatch.setattr(process_module, "POLL_SECONDS", 0.1)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run of test_vllm_recipes.py has servers that are the command itself."""
    with forked_environment(tmp_path_factory.mktemp("vllm") / "environment") as folder:
        yield folder


def spec(environment: Path, *arguments: str) -> ServerSpec:
    python = environment / "bin" / "python"
    return ServerSpec(python=python, model="nothing", dtype="float32", raw_logprobs=True, arguments=arguments)


def lives(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(processes: list[int]) -> None:
    wait_until(lambda: not any(map(lives, processes)))


def child_in(log: Path) -> int:
    wait_until(lambda: re.search(r"child (\d+)\n", log.read_text()))
    return int(log.read_text().partition("child ")[2].partition("\n")[0])


OF_TORCHRUN = {
    *(f"{kind}{what}" for kind in ("", "LOCAL_", "GROUP_", "ROLE_") for what in ("RANK", "WORLD_SIZE")),
    *("ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *(f"TORCHELASTIC_{what}" for what in ("USE_AGENT_STORE", "RESTART_COUNT", "RUN_ID")),
}


def test_a_server_is_no_rank_of_the_run(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch looks for the server's own processes in the store of the run, and waits for it for ever."""
    given: list[dict[str, str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda _, env: given.append(env))
    launch._start(["proximo"], rank=1, num=2, port=20_000)
    names = OF_TORCHRUN | ({*given[0]} - {*os.environ})
    assert {"PROXIMO_LAUNCHED", *OF_TORCHRUN} <= names
    for name in (*names, "GROUP_OF_USER"):
        monkeypatch.setenv(name, "1")
    found = spec(environment).variables()
    assert not names & {*found}
    assert {"GROUP_OF_USER", "PATH"} <= {*found}


def test_a_server_ends_with_all_that_it_started(environment: Path, tmp_path: Path) -> None:
    """Also what left its group and session."""
    process = ServerProcess(spec(environment, "--sleep"), log=tmp_path / "log")
    assert process.url == f"unix://{tmp_path}/log.sock"
    child = child_in(tmp_path / "log")
    assert lives(child)
    ignored = re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{child}/status").read_text())
    assert ignored is not None
    assert not int(ignored[1], 16) >> (signal.SIGTERM - 1) & 1, "it could not be asked to end"
    process.close()
    process.close()
    wait_until_gone([child, process._process._process.pid])


def test_an_environment_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be taken for one that can serve, and a second attempt would be refused."""

    def fail(command: list[str], **_: Any) -> Any:
        (tmp_path / "made" / "bin").mkdir(parents=True, exist_ok=True)
        return subprocess.CompletedProcess(command, int("pip" in command), stdout="", stderr="no such version")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(UserError, match="installing torch.* failed: .*\nno such version"):
        install(tmp_path / "made", device="cpu", say=print)
    assert not (tmp_path / "made").exists()


STARTER = """
import sys, time
from pathlib import Path
from proximo.rollout.vllm.process import ServerProcess, ServerSpec
spec = ServerSpec(python=Path(sys.argv[1]), model="nothing", dtype="float32", raw_logprobs=True, arguments=("--sleep",))
process = ServerProcess(spec, log=Path(sys.argv[2], "log"), folder=Path(sys.argv[2]))
print(process._process._process.pid, flush=True)
time.sleep(600)
"""


def test_a_server_ends_with_a_run_that_is_killed(environment: Path, tmp_path: Path) -> None:
    """Its folder goes too: it may hold a model."""
    folder = tmp_path / "folder"
    (folder / "model").mkdir(parents=True)
    command = [sys.executable, "-c", STARTER, str(environment / "bin" / "python"), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        guardian = int(run.stdout.readline())
        child = child_in(folder / "log")
        os.kill(run.pid, signal.SIGKILL)
    wait_until_gone([child, guardian])
    assert not folder.exists()


def test_a_server_that_is_not_ready_in_time_is_told_with_the_limit(environment: Path, tmp_path: Path) -> None:
    process = ServerProcess(spec(environment, "--sleep"), log=tmp_path / "log")
    server = VLLMServer(process.url)
    try:
        with pytest.raises(TrainingError, match=r"not ready after 0\.1 s \(engine\.start_seconds\)"):
            process.wait_until_ready(server, seconds=0.1)
    finally:
        server.close()
        process.close()


def test_a_server_that_ends_is_started_again_a_few_times_and_its_log_keeps_all_that_it_said(
    environment: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text("what a server of an earlier run said\n")
    process = ServerProcess(spec(environment, "--fail"), log=log, folder=tmp_path)
    for number in range(MAX_RESTARTS + 1):
        process._process._process.wait(LATEST_SECONDS)
        process._socket.touch()  # where it listened, as a process leaves it that is killed
        assert process.restart_if_ended() == (number < MAX_RESTARTS)
    assert process.has_ended()
    assert f"it has ended with status 1 after {MAX_RESTARTS} restarts" in process.last_words()
    assert "earlier run" not in process.last_words()
    assert log.read_text().count("no memory for one block") == MAX_RESTARTS + 1
    assert log.read_text().startswith("what a server of an earlier run said")
    process.close()
    process._num_restarts = 0
    assert not process.restart_if_ended(), "a thread that still waits for its answer begins no server"


def recipe(place: Path, folder: Path, **engine: Any) -> Path:
    made = changed(recipe_of("ppo", place), {"run.folder": str(folder), "run.num_threads": 1})
    path = folder.with_suffix(".json")
    path.write_text(json.dumps(made | {"engine": {"kind": "vllm", **engine}}))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs") / "place")


@pytest.fixture
def no_folder_left() -> Iterator[None]:
    """No folder with weights of this process is left in memory, beside those of engines that other tests left."""
    pattern = f"proximo-weights-*-{os.getpid()}-*"
    before = set(Path("/dev/shm").glob(pattern))
    yield
    assert set(Path("/dev/shm").glob(pattern)) <= before


def test_a_server_that_ends_within_each_rollout_ends_the_run_with_its_last_words(
    environment: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "MAX_RESTARTS", 1)
    given = recipe(place, tmp_path / "run", environment=str(environment), arguments=["--dies-after=3"])
    assert main(["ppo", str(given), "--quiet"]) == 1
    told = capsys.readouterr().err
    log = tmp_path / "run" / "servers" / "server-0.log"
    assert f"it has ended with status 9 after 1 restarts; the end of {log}:" in told
    assert "no memory for one more response" in told
    assert log.read_text().count("child") == 2


@pytest.mark.usefixtures("no_folder_left")
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_server_that_ends_within_a_run_is_started_again_and_gets_the_weights(
    *, replicas: int, environment: Path, place: Path, tmp_path: Path
) -> None:
    arguments = ["--dies-after=3", f"--dies-once={tmp_path / 'died'}"]
    engine = {"environment": str(environment), "arguments": arguments, "replicas": replicas}
    assert main(["ppo", str(recipe(place, tmp_path / "run", **engine)), "--quiet"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / METRICS).read_text().splitlines()]
    steps = [line for line in lines if "mismatch/k3" in line]
    assert len(steps) == 5
    assert all(line["mismatch/max_abs_log_ratio"] < 1e-4 for line in steps)
    assert steps[-1]["engine/restarts"] == 1
    logs = [path.read_text() for path in sorted((tmp_path / "run" / "servers").iterdir())]
    assert sum(log.count("child") for log in logs) == replicas + 1
    assert any("no memory for one more response" in log for log in logs)


def test_a_server_that_does_not_start_leaves_its_log_where_the_next_start_finds_an_empty_run(
    environment: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "run" / "servers" / "server-0.log"
    given = recipe(place, tmp_path / "run", environment=str(environment), arguments=["--fail"])
    assert main(["ppo", str(given), "--quiet"]) == 1
    assert (
        f"ended with status 1 before it was ready; the end of {log}:\n  no memory for one block of the cache"
        in capsys.readouterr().err
    )
    given = recipe(place, tmp_path / "run", environment=str(environment))
    assert main(["ppo", str(given), "--quiet", "ppo.num_steps=1"]) == 0
    assert main(["ppo", str(given), "--quiet", "ppo.num_steps=1", "--overwrite"]) == 0
    assert re.findall("no memory|child", log.read_text()) == ["no memory", "child", "child"]
    assert not (tmp_path / "run.replaced-1" / "servers").exists()


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"environment": "/nowhere"}, "no vLLM environment in /nowhere: make one with `proximo engine install`"),
        ({"addresses": ["http://127.0.0.1:9"]}, "no vLLM server answers at http://127.0.0.1:9 .engine.addresses."),
        ({"transfer_folder": "/nowhere"}, "engine.transfer_folder: there is no folder /nowhere"),
    ],
)
def test_what_is_not_there_is_refused_before_a_model_is_loaded(
    *,
    engine: dict[str, Any],
    message: str,
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(from_recipe, "build_language_model", None)
    given = recipe(place, tmp_path / "run", **engine)
    assert main(["ppo", str(given)]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_resumed_ends_with_the_same_bits(environment: Path, place: Path, tmp_path: Path) -> None:
    """Its servers are new, and get the weights of the checkpoint. Their limits may change, what samples may not."""
    given = recipe(place, tmp_path / "run", environment=str(environment))
    assert main(["ppo", str(given), "--quiet"]) == 0
    whole, cut = tmp_path / "whole", tmp_path / "run"
    shutil.copytree(cut, whole)
    shutil.rmtree(cut / "checkpoints" / "step-000005")
    (cut / "checkpoints" / "latest").write_text("step-000004")
    resumed = ["ppo", str(given), "--quiet", "--resume"]
    assert main([*resumed, "engine.dtype=bfloat16"]) == 2
    assert main([*resumed, "engine.request_seconds=300"]) == 0
    timed = re.compile("time|memory|second|bytes")

    def lines(folder: Path) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
        return [{key: value for key, value in line.items() if not timed.search(key)} for line in found]

    assert lines(cut) == lines(whole)
    weights = [path.relative_to(whole) for path in (whole / "checkpoints" / "step-000005").rglob("*.safetensors")]
    assert weights
    assert all((cut / path).read_bytes() == (whole / path).read_bytes() for path in weights)


def test_a_server_that_takes_the_question_and_does_not_answer_is_refused_at_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_section, "CHECK_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"no vLLM server answers at {url}"):
            engine_section.check_engine(VLLMEngineConfig(kind="vllm", addresses=[url]))
