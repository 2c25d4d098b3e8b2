"""The process that starts ranks: its store, and ranks that are killed, are stopped, or get a signal alone."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distributed.launched import MOST_SECONDS, end, sft_recipe, start, wait_for_lines
from proximo.checkpoint.run_folder import MARKER, OUTCOME, open_abandoned, open_run
from proximo.distributed import launch
from proximo.run.journal import write_outcome_of_lost

SCRIPT = """
import os, signal, sys
first, second = sys.argv[1:]
deed = [first, second][int(os.environ["RANK"])]
if deed.isdecimal():
    sys.exit(int(deed))
os.kill(os.getpid(), signal.Signals[deed])
"""
"""A rank without torch: it exits with a status, or sends itself a signal."""


def launched(first: str, second: str) -> tuple[int, list[tuple[str, str]]]:
    """Exit status of a launch of two such ranks, and what was said of a lost rank 0."""
    lost: list[tuple[str, str]] = []
    status: list[int] = []

    def run() -> None:
        command = [sys.executable, "-c", SCRIPT, first, second]
        status.append(launch.launch(command, num=2, when_lost=lambda by, reason: lost.append((by, reason))))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(MOST_SECONDS)
    assert status, "it waits still"
    return status[0], lost


@pytest.mark.parametrize(("first", "second", "status"), [("3", "SIGSTOP", 3), ("SIGSTOP", "3", 137)])
def test_a_rank_that_is_stopped_is_not_waited_for_once_the_run_has_failed(
    first: str, second: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "END_SECONDS", 1e9)
    assert launched(first, second)[0] == status


def test_a_rank_0_that_a_signal_ended_is_told_of_and_one_that_ended_itself_is_not() -> None:
    status, ((by, reason),) = launched("SIGKILL", "0")
    assert status == 137
    assert by.startswith("process ")
    assert reason == f"rank 0 ({by}) was ended by SIGKILL"
    assert launched("3", "0") == (3, [])
    assert launched("0", "SIGKILL") == (137, [])


def test_the_outcome_of_a_lost_run_is_written_where_no_other_run_has_begun(tmp_path: Path) -> None:
    folder, lost = tmp_path / "run", f"process 1 on {socket.gethostname()}"
    write_outcome_of_lost(folder, by=lost, reason="x")
    assert not folder.exists()
    open_run(folder).close()
    write_outcome_of_lost(folder, by=lost, reason="x")
    assert not (folder / OUTCOME).exists(), "another process has begun a run there"
    (folder / MARKER).write_text(f"{lost}\n")
    write_outcome_of_lost(folder, by=lost, reason="rank 0 was\nended")
    assert '"reason": "rank 0 was ended"' in (folder / OUTCOME).read_text()
    assert (folder / "report.html").is_file()
    assert (folder / "log.txt").read_text() == f"rank 0 was ended\nfailed, report in {folder}/report.html\n"
    (folder / MARKER).write_text(f"{lost}\n")
    assert open_abandoned(folder, by=lost) is None, "it has an outcome"


def children(process: int) -> dict[int, int]:
    """Rank -> process."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    ranks: dict[int, int] = {}
    for child in found:
        variables = dict(part.partition("=")[::2] for part in Path(f"/proc/{child}/environ").read_text().split("\0"))
        if "RANK" in variables:
            ranks[int(variables["RANK"])] = int(child)
    return ranks


def listening(processes: Iterable[int]) -> set[str]:
    """The addresses at which the processes listen, as the kernel writes them."""
    sockets = {os.readlink(file) for each in processes for file in Path(f"/proc/{each}/fd").iterdir()}
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


STOP, KILL = signal.SIGSTOP, signal.SIGKILL


ENDS = {
    # None of them sees the other end.
    "all are killed": ([(STOP, 0), (STOP, 1), (KILL, 0), (KILL, 1)], "was ended by SIGKILL"),
    "rank 0 is stopped": ([(STOP, 0)], "rank 0 (process {} on {}) is stopped or gone: no sign of life"),
}


def test_a_signal_to_rank_1_changes_nothing_and_the_end_of_rank_0_is_in_the_folder(tmp_path: Path) -> None:
    """Both runs at once: most of it is waiting."""
    recipes = [sft_recipe(tmp_path / name, num=2, timeout_seconds=10) for name in ENDS]
    with ThreadPoolExecutor() as threads:
        list(threads.map(check_end, recipes, *zip(*ENDS.values(), strict=True)))


def check_end(recipe: Path, signals: list[tuple[int, int]], reason: str) -> None:
    many = ("sft.num_epochs=8000", "run.save_every_steps=100000", "run.evaluate_every_steps=100000")
    process = start([sys.executable, "-P", "-m", "proximo", "sft", str(recipe), *many])
    run = recipe.with_name("run")
    wait_for_lines(run, 2)
    ranks = children(process.pid)
    addresses = listening([process.pid, *ranks.values()])
    os.kill(ranks[1], signal.SIGTERM)
    wait_for_lines(run, (run / "metrics.jsonl").read_bytes().count(b"\n") + 2)
    for number, rank in signals:
        os.kill(ranks[rank], number)
    ended = end(process, recipe)
    assert addresses == {"0100007F"}, "nobody else can reach the store and the ranks"
    assert ended.status == 137, ended.output
    assert (ended.outcome["state"], ended.outcome["total_steps"]) == ("failed", 20_000)
    assert reason.format(ranks[0], socket.gethostname()) in ended.outcome["reason"]
    assert "failed, report in" in (run / "log.txt").read_text().splitlines()[-1]
    assert (run / "report.html").is_file()
