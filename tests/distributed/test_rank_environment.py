"""Which rank a process is, as torchrun and Slurm say it, and what does not fit them."""

import gc
import subprocess
import sys

import pytest
import torch

from proximo.cli import ranks
from proximo.cli.ranks import check_ranks
from proximo.distributed.launch import launch
from proximo.distributed.rank_environment import find_place, first_host
from proximo.distributed.world import World, using
from proximo.errors import ConfigError
from proximo.models.precision.placement import resolve_device
from proximo.ppo.recipe import PPORecipe

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "10",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "1",
}


def recipe(**settings: object) -> PPORecipe:
    return PPORecipe.model_validate(
        {
            "run": {"folder": "runs/x"},
            "model": {"path": "owner/model"},
            "data": {"sources": [{"path": "owner/prompts"}]},
            "reward": [{"kind": "model", "path": "owner/reward"}],
            "ppo": {"num_steps": 1},
            **settings,
        }
    )


def test_a_process_alone_has_no_place() -> None:
    assert find_place({}) is None
    assert find_place({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}) is None
    batch_script = {name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP_")}
    assert find_place(batch_script) is None


def test_the_variables_of_torchrun() -> None:
    place = find_place(TORCHRUN)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (5, 8, 1, 4)
    assert (place.host, place.port, place.attempt, place.starter) == ("node1", 29500, "2", "torchrun")
    assert not place.hosts_store
    first = find_place({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert first is not None
    assert first.hosts_store
    assert not first.one_machine


def test_the_variables_of_slurm() -> None:
    place = find_place(SLURM)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (9, 10, 1, 2)
    assert (place.host, place.starter) == ("gpu07", "slurm")
    assert 20_000 <= place.port < 40_000
    assert find_place({**SLURM, "SLURM_STEP_ID": "2"}) != place  # steps of one job do not meet
    assert place.run == "Slurm's job 1234, step 1"
    again = find_place({**SLURM, "SLURM_RESTART_COUNT": "2"})
    assert again is not None
    assert (place.attempt, again.attempt) == ("0", "2")
    named = find_place({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert named is not None
    assert (named.host, named.port) == ("10.0.0.1", 4000)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("node1", "node1"), ("a-1,a-2", "a-1"), ("gpu[07-09,12]", "gpu07"), ("r[1,3]n-x,b", "r1n-x"), ("n[005]", "n005")],
)
def test_the_first_of_slurms_hosts(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_ADDR": ""}, "has no MASTER_ADDR: start the ranks by torchrun or srun"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'; a number is wanted"),
        ({"RANK": "8"}, "rank 8 of 8"),
    ],
)
def test_variables_that_do_not_fit_are_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_place({**TORCHRUN, **changes})


def test_a_recipe_that_does_not_fit_the_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    place = find_place(TORCHRUN)
    check_ranks(recipe(devices={"num": 8}), place)
    check_ranks(recipe(), place)
    with pytest.raises(ConfigError, match=r"devices.num is 4, but torchrun started 8 ranks: set devices.num to 8"):
        check_ranks(recipe(devices={"num": 4}), place)
    with pytest.raises(ConfigError, match=r"run.device is cuda:1, but each of 8 ranks has one device"):
        check_ranks(recipe(run={"folder": "x", "device": "cuda:1"}), place)
    with pytest.raises(ConfigError, match=r"devices.value.device is cpu, but each of 8 ranks has one device"):
        check_ranks(recipe(devices={"value": {"device": "cpu"}}), place)
    check_ranks(recipe(run={"folder": "x", "device": "cuda:1"}), None)  # one rank
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_ranks(recipe(), None)
    with pytest.raises(ConfigError, match="devices.num is 4, but torchrun started one rank"):
        check_ranks(recipe(devices={"num": 4}), None)


def test_more_ranks_than_cuda_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    world = World()
    world.size, world.rank, world.local_size, world.local_rank = 8, 6, 4, 2
    with using(world):
        assert resolve_device("auto") == torch.device("cuda", 2)
        assert resolve_device("cpu") == torch.device("cpu")
        world.local_size = 8
        with pytest.raises(ConfigError, match="8 ranks run on this machine, and each sees 4 CUDA devices of it"):
            resolve_device("cuda")


def test_a_rank_that_sees_one_device_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under Slurm's --gpus-per-task=1. Ranks that see the same one are refused."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    world = World()
    world.size, world.rank, world.local_size, world.local_rank = 16, 13, 8, 5
    with using(world):
        assert resolve_device("auto") == torch.device("cuda", 0)
        world.with_same_device = [12, 13]
        with pytest.raises(ConfigError, match="ranks 12, 13 have the same CUDA device: start one rank per device"):
            resolve_device("auto")
        assert resolve_device("cpu") == torch.device("cpu")


def test_where_a_rank_cannot_be_started_those_before_it_are_ended(monkeypatch):
    started, popen = [], subprocess.Popen

    def start(command, **named):
        if len(started) == 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(popen(command, **named))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(ConfigError, match="rank 1 of 3 cannot be started on this machine .*: set devices.num"):
        launch([sys.executable, "-c", "import time; time.sleep(600)"], num=3)
    try:
        assert started[0].poll() is not None
    finally:
        started[0].kill()


def test_the_end_of_a_rank_looks_for_no_garbage(monkeypatch):
    """The modules that sharding imports have so many objects that this took seconds."""
    monkeypatch.setattr(ranks, "_join_and_run", lambda *_: 0)
    place = find_place({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"})
    assert place is not None
    frozen = gc.get_freeze_count()
    try:
        assert ranks.run_rank(place, prepare=lambda: pytest.fail("not called"), run=lambda *_: 0) == 0
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
