"""Worker processes from outside: what they are given, that nothing of them is left, and that they may be killed."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from pool_clock import PoolClock, hangs
from proximo_verifiers import progress_log
from proximo_verifiers.errors import WorkersError
from proximo_verifiers.grader import Grader
from proximo_verifiers.verifier import Answer, ScoreState
from proximo_verifiers.workers import loop
from proximo_verifiers.workers import pool as pools
from proximo_verifiers.workers.frames import MAX_FRAME_BYTES, FrameDecoder, FrameError, encode
from proximo_verifiers.workers.loop import PoolLimits
from proximo_verifiers.workers.process import WorkerSpec
from proximo_verifiers.workers.work import Done
from waiting import LATEST_SECONDS, wait_until
from worker_processes import workers_of

LIMITS = PoolLimits(num_workers=2, answer_seconds=120.0, attempts=3)


def test_messages_survive_any_cut_into_pieces() -> None:
    messages = [{"a": [1, None, "ü\udc80"]}, 3.5, "x" * 1000, []]
    whole = b"".join(map(encode, messages))
    for size in (1, 3, 7, 999, len(whole)):
        decoder = FrameDecoder()
        pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
        assert [message for piece in pieces for message in decoder.feed(piece)] == messages


@pytest.mark.parametrize(
    "piece", [(MAX_FRAME_BYTES + 1).to_bytes(4), b"\0\0\0\1{", b"\0\0\x03\xe8" + b"[" * 1000, b"\0\0\0\1\xff"]
)
def test_what_is_no_message_is_refused(piece: bytes) -> None:
    with pytest.raises(FrameError):
        list(FrameDecoder().feed(piece))


def test_a_worker_gets_no_secret_and_a_session_and_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    grader = Grader("example_verifiers:Environment", name="j", num_workers=1)
    try:
        (found,) = grader.grade([Answer(text="")])
        facts = json.loads(found.reason or "")
        assert Path(facts["folder"], "left").is_file()
    finally:
        grader.close()
    known = {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONHASHSEED", "OMP_NUM_THREADS"}
    assert set(facts["names"]) <= known | {"PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH"}
    assert facts["session"] is True
    assert not Path(facts["folder"]).exists(), "what a verifier leaves in its folder goes with the worker"


def test_closing_closes_the_verifiers_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark, left = tmp_path / "closed", tmp_path / "proximo-worker-of-a-killed-run"
    left.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    grader = Grader("example_verifiers:Closing", name="j", num_workers=2, options={"mark": str(mark)})
    grader.grade([Answer(text="")])
    assert len(workers_of(os.getpid())) == 2
    assert not left.exists()
    grader.close()
    assert mark.exists()
    assert workers_of(os.getpid()) == []
    grader.close()
    with pytest.raises(WorkersError, match="its workers have ended"):
        grader.grade([Answer(text="late")])


def test_a_worker_at_work_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = tmp_path / "begun"
    monkeypatch.setattr(pools, "time", PoolClock((hangs(begun, 1), 600.0)))
    monkeypatch.setattr(pools, "LOG_EVERY_SECONDS", 0.1)
    grader = Grader(
        "example_verifiers:Hostile",
        name="j",
        num_workers=1,
        options={"begun": str(begun)},
        step_seconds=600,
        answer_seconds=600,
    )
    grader.grade([Answer(text="leave_a_child"), Answer(text="sleep")])
    grader.close()
    wait_until(lambda: workers_of(os.getpid()) == [])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent ended")
def test_nothing_outlives_a_trainer_that_is_killed() -> None:
    program = (
        "from proximo_verifiers.workers.frames import encode\n"
        "from proximo_verifiers.workers.loop import PoolLimits\n"
        "from proximo_verifiers.workers.pool import WorkerPool\n"
        "from proximo_verifiers.workers.process import WorkerSpec\n"
        "limits = PoolLimits(num_workers=3, answer_seconds=600.0, attempts=3)\n"
        "pool = WorkerPool(WorkerSpec(path='example_verifiers:Hostile'), limits, name='j')\n"
        "rest = {'prompt': '', 'reference': None, 'metadata': {}, 'finish': 'eos', 'num_tokens': 1}\n"
        "texts = ('leave_a_child', 'sleep', 'spin', 'sleep')\n"
        "work = pool.submit(encode({'grade': {'text': text, **rest}}) for text in texts)\n"
        "pool.wait(work[:1], seconds=600, limit='the test')\n"
        "print('ready', flush=True)\n"
        "pool.wait(work, seconds=600, limit='the test')\n"
    )
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"ready\n"
        wait_until(lambda: len(workers_of(trainer.pid)) >= 2)
        trainer.kill()
    wait_until(lambda: workers_of(trainer.pid) == [])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent ended")
def test_a_child_whose_parent_ends_before_it_first_ran_does_not_outlive_it() -> None:
    program = (
        "import os, time\n"
        "from proximo_verifiers.workers.main import die_with\n"
        "def wait_for_the_parent_to_end():\n"  # as a busy machine may have it
        "    while os.getppid() == worker:\n"
        "        time.sleep(0.01)\n"
        "os.register_at_fork(after_in_child=wait_for_the_parent_to_end)\n"
        "die_with(os.getppid())\n"
        "worker = os.getpid()\n"
        "if os.fork():\n"
        "    os._exit(0)\n"
        "os.write(1, b'lives')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=LATEST_SECONDS, check=True)
    assert ended.stdout == b""


def kill_one(draw: random.Random) -> int:
    """How many workers died of it: 1, or 0 where it had ended by itself. Waits for one where all were killed."""
    workers: list[int] = []
    wait_until(lambda: workers.extend(workers_of(os.getpid())) or workers)
    with suppress(ProcessLookupError):
        os.kill(draw.choice(workers), draw.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM]))
        return 1
    return 0


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_grades_are_right_though_workers_are_killed_at_random(count: int) -> None:
    draw = random.Random(1)
    texts = ["".join(draw.choices("abcdefgh", k=draw.randint(0, 20))) for _ in range(count)]
    grader = Grader("example_verifiers:Letters", name="j", num_workers=2, attempts=6, step_seconds=300)
    found, killed = [], 0
    try:
        for first in range(0, count, 10):
            batch = [Answer(text=text) for text in texts[first : first + 10]]
            for each in batch:
                grader.begin(each)
            killed += kill_one(draw) if draw.random() < 0.1 else 0
            found += grader.grade(batch)
        counts = grader.take_counts()
    finally:
        grader.close()
    graded = [(text, each) for text, each in zip(texts, found, strict=True) if each.state.has_score]
    assert len(found) == count
    assert killed >= 3
    assert counts.num_restarts >= 1
    assert [each.score for _, each in graded] == [text.count("a") / (len(text) + 1) for text, _ in graded]
    faulty = [each for each in found if not each.state.has_score]
    assert {each.state for each in faulty} <= {ScoreState.INFRASTRUCTURE_FAULT}
    assert len(faulty) <= count / 100, "six attempts are enough"
    assert workers_of(os.getpid()) == []


def test_a_wait_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def is_said() -> bool:
        pattern = r"waiting for reward source maths: 1 of 2 answered in \d+ s"
        return any(re.fullmatch(pattern, record.getMessage()) for record in caplog.records)

    monkeypatch.setattr(pools, "LOG_EVERY_SECONDS", 0.1)
    monkeypatch.setattr(pools, "time", PoolClock((is_said, 600.0)))
    grader = Grader("example_verifiers:Hostile", name="maths", num_workers=1, answer_seconds=1000, step_seconds=600)
    with caplog.at_level("INFO", logger="proximo_verifiers"):
        grader.grade([Answer(text="fine"), Answer(text="sleep")])
    grader.close()
    assert is_said()


def test_a_start_that_takes_long_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pattern = r"reward source maths: waiting for its first worker since \d+ s"

    def starts_once_it_is_said() -> None:
        wait_until(lambda: any(re.fullmatch(pattern, record.getMessage()) for record in caplog.records))
        (tmp_path / "go on").touch()

    monkeypatch.setattr(progress_log, "LOG_EVERY_SECONDS", 0.1)
    threading.Thread(target=starts_once_it_is_said, daemon=True).start()
    Grader("example_verifiers:Late", name="maths", num_workers=1, options={"go_on": str(tmp_path / "go on")}).close()


def test_a_verifier_that_can_no_longer_be_made_costs_the_answers_and_not_the_time(tmp_path: Path) -> None:
    package = tmp_path / "vanishing.py"
    package.write_text("from example_verifiers import Hostile as Vanishing\n")
    sys.path.insert(0, str(tmp_path))
    try:
        grader = Grader("vanishing:Vanishing", name="j", num_workers=1, step_seconds=600, attempts=2)
        package.unlink()
        found = grader.grade([Answer(text="die"), Answer(text="fine")])
        grader.close()
    finally:
        sys.path.remove(str(tmp_path))
    assert [each.state for each in found] == [ScoreState.INFRASTRUCTURE_FAULT] * 2
    assert "no worker could be started: 'vanishing:Vanishing': there is no module" in (found[1].reason or "")


def test_quick_work_is_handed_out_ahead_and_slow_work_is_shared() -> None:
    pool = pools.WorkerPool(WorkerSpec(path="example_verifiers:Letters"), LIMITS, name="j")
    try:
        request = {"text": "a", "prompt": "", "reference": None, "metadata": {}, "finish": "eos", "num_tokens": 1}
        work = pool.submit(encode({"grade": request | {"text": "a" * n}}) for n in range(500))
        outcomes = pool.wait(work, seconds=600, limit="the test")
    finally:
        pool.close()
    assert [each.value["score"] for each in outcomes if isinstance(each, Done)] == [n / (n + 1) for n in range(500)]


class Idle:
    """A worker that does not end when it is dismissed."""

    is_ready, in_flight = True, ()

    def __init__(self) -> None:
        self.said: list[str] = []

    def dismiss(self) -> None:
        self.said.append("dismissed")

    def has_died(self) -> bool:
        return "killed" in self.said

    def kill(self) -> None:
        self.said.append("killed")


def test_a_worker_that_does_not_end_is_waited_for_so_long_and_then_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = [0.0]

    def sleep(_: float) -> None:
        assert worker.said == ["dismissed"]
        passed[0] += loop.CLOSE_SECONDS / 4

    worker, clock = Idle(), SimpleNamespace(monotonic=lambda: passed[0], sleep=sleep)
    monkeypatch.setattr(loop, "time", clock)
    loop.WorkerLoop._shut_down(SimpleNamespace(_workers=[worker]))  # ty: ignore[invalid-argument-type]
    assert worker.said == ["dismissed", "killed"]
    assert loop.CLOSE_SECONDS < passed[0] <= 1.25 * loop.CLOSE_SECONDS
