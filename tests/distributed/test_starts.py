"""Ranks that srun starts: what they say when they begin, and what is refused before anything is loaded."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from distributed.launched import MOST_SECONDS, sft_recipe
from distributed.ranks import joined
from proximo.checkpoint import ranks
from proximo.cli.ranks import note_idle_tasks
from proximo.distributed.world import current

SRUN = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NODELIST": "node1",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "MASTER_ADDR": "127.0.0.1",
}


def start(rank: int, port: int, *arguments: str) -> subprocess.Popen[str]:
    """A rank of two, of the command `proximo sft`."""
    place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "proximo", "sft", *arguments],
        env={**os.environ, **SRUN, **place},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(*processes: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """Exit status and output of each."""
    try:
        outputs = [process.communicate(timeout=MOST_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


@pytest.fixture
def port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_ranks_with_other_recipes_are_refused_with_the_key_that_differs(tmp_path: Path, port: int) -> None:
    recipe = str(sft_recipe(tmp_path))
    first, second = ended(start(0, port, recipe), start(1, port, recipe, "sft.examples_per_step=2"))
    assert first == (
        2,
        f"2 ranks, started by slurm, meet at 127.0.0.1:{port}\n"
        "error: the ranks were started differently (rank 0 -> rank 1): start all with one command, one recipe file and "
        "one environment\n  sft.examples_per_step: 4 -> 2\n",
    )
    assert second == (2, "")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "says"),
    [({"SLURM_NTASKS": "8"}, True), ({"SLURM_NTASKS": "1"}, False), ({"SLURM_NTASKS": "8", **SRUN}, False)],
)
def test_a_process_alone_in_a_job_of_several_tasks_says_so(
    given: dict[str, str], says: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", given)
    note_idle_tasks()
    note = (
        "note: this Slurm job has 8 tasks, but this process trains alone: start the command by srun for a rank in "
        "each task, or set devices.num for the devices of this machine\n"
    )
    assert capsys.readouterr().err == (note if says else "")


def test_a_rank_that_finds_another_run_at_its_address_says_so_and_leaves_it_alone(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("run", "Slurm's job 11, step 0")
    num_keys = store.num_keys()
    ((status, output),) = ended(start(1, store.port, str(sft_recipe(tmp_path))))
    assert status == 1
    assert output.startswith("error: rank 1 of 2 (process ")
    assert output.endswith(
        f"belongs to Slurm's job 12, step 0, but at 127.0.0.1:{store.port} it found the ranks of Slurm's job 11, "
        "step 0: give each run another MASTER_PORT\n"
    )
    assert store.num_keys() == num_keys, "it has joined them"


def check_own_folder(place: Path, shared: bool) -> None:
    ranks.SEEN_SECONDS = 0.0
    folder = place if shared else place / str(current().rank)
    folder.mkdir(exist_ok=True)
    ranks.check_shared(folder)


def test_a_run_folder_that_other_ranks_do_not_see_is_refused_before_the_first_step(tmp_path: Path) -> None:
    refused = joined(check_own_folder, tmp_path, False)
    for end, place in zip(refused, (tmp_path / "0", tmp_path / "1"), strict=True):
        assert end.error == (
            f"RunFolderError: rank 1 of 2 does not see what rank 0 writes into {place}: run.folder must be on a file "
            "system that all machines of the run share"
        )
    assert [end.error for end in joined(check_own_folder, tmp_path, True)] == ["", ""]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["0", "1"], "the file is removed"
