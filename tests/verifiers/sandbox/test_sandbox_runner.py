"""What the caller of a sandbox sees: outcomes, limits, several programs at once, ends of every kind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from sandbox_cases import QUICK
from sandbox_host import processes_of

from proximo_verifiers.errors import SandboxError
from proximo_verifiers.sandbox.jobs import Ending, Limits, Outcome, Program
from proximo_verifiers.sandbox.runner import Sandbox
from waiting import LATEST_SECONDS, wait_until

pytestmark = pytest.mark.usefixtures("whole_sandbox")


@pytest.fixture(scope="module")
def sandbox(whole_sandbox) -> Iterator[Sandbox]:
    """One for all tests of this file."""
    with Sandbox() as made:
        yield made


def run(sandbox: Sandbox, source: str, **changes: float) -> Outcome:
    return sandbox.run(Program(source=textwrap.dedent(source), limits=replace(QUICK, **changes)))


def test_a_program_has_its_output_its_errors_and_its_status(sandbox):
    outcome = run(sandbox, "import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(3)")
    assert (outcome.ending, outcome.status) == (Ending.EXIT, 3)
    assert (outcome.stdout, outcome.stderr) == (b"out\n", b"err\n")


def test_a_traceback_names_the_program_alone(sandbox):
    errors = run(sandbox, "def f():\n    return 1 / 0\nf()").stderr.decode()
    assert errors.startswith("Traceback (most recent call last):\n")
    assert errors.count("File ") == errors.count("program.py") == 2
    assert errors.endswith("ZeroDivisionError: division by zero\n")


def test_cpu_seconds_are_those_of_the_program(sandbox):
    outcome = run(sandbox, "import time\nwhile time.process_time() < 0.4: pass")
    assert outcome.ending is Ending.EXIT
    # Its own clock began a little earlier, with its confinement.
    assert 0.25 < outcome.cpu_seconds < 0.5


@pytest.mark.parametrize("limit", [0.05, 0.3])
def test_the_cpu_limit_is_kept_to_hundredths_of_a_second(sandbox, limit):
    """Where the fork server gets the processor in time, as at least once in ten times."""
    used = []
    while len(used) < 10 and not (used and min(used) < limit + 0.05):
        outcome = run(sandbox, "while True: pass", cpu_seconds=limit)
        assert outcome.ending is Ending.CPU
        used.append(outcome.cpu_seconds)
    assert limit <= min(used) < limit + 0.05


def test_the_wall_limit_ends_what_uses_no_cpu(sandbox):
    outcome = run(sandbox, "import time\ntime.sleep(60)", wall_seconds=0.2)
    assert outcome.ending is Ending.WALL
    assert outcome.wall_seconds >= 0.2
    assert outcome.cpu_seconds < 0.1


def test_limits_end_a_program_while_nobody_waits_for_it(sandbox):
    job = sandbox.start(Program(source="while True: pass", limits=replace(QUICK, cpu_seconds=0.05)))
    time.sleep(2)
    outcome = job.wait()
    assert outcome.ending is Ending.CPU
    assert outcome.cpu_seconds < 1, "not the two seconds in which nobody waited"


def test_output_beyond_the_limit_is_cut_and_ends_the_program(sandbox):
    outcome = run(sandbox, "print('x' * 2000, end='')", output_bytes=1999)
    assert (outcome.ending, outcome.stdout) == (Ending.OUTPUT, b"x" * 1999)
    assert run(sandbox, "print('x' * 2000, end='')", output_bytes=2000).ending is Ending.EXIT


def test_a_program_that_runs_out_of_memory_says_so(sandbox):
    outcome = run(sandbox, "bytearray(1 << 40)")
    assert outcome.ending is Ending.MEMORY
    assert b"MemoryError" in outcome.stderr


def test_memory_within_the_limit_can_be_used(sandbox):
    outcome = run(sandbox, "print(len(bytearray(100 << 20)))", memory_bytes=256 << 20)
    assert outcome.stdout == b"104857600\n"
    assert run(sandbox, "bytearray(250 << 20)", memory_bytes=256 << 20).ending is Ending.MEMORY


def test_several_programs_run_at_once_are_told_apart_and_do_not_see_each_others_files(sandbox):
    """Each goes on when all have begun."""
    begun, begin = os.pipe()
    may_go, go = os.pipe()
    source = "import os\nopen('mine{}', 'w').close()\nos.write(3, b'x')\nos.read(4, 1)\nprint(os.listdir('.'))"
    limits = replace(QUICK, wall_seconds=LATEST_SECONDS)
    jobs = [
        sandbox.start(Program(source=source.format(number), descriptors={3: begin, 4: may_go}, limits=limits))
        for number in range(8)
    ]
    os.close(begin)
    assert sum(len(os.read(begun, 1)) for _ in jobs) == 8
    os.write(go, b"x" * 8)
    assert [job.wait().stdout.decode() for job in reversed(jobs)] == [f"['mine{n}']\n" for n in reversed(range(8))]
    for descriptor in (begun, may_go, go):
        os.close(descriptor)


def test_a_killed_program_says_so(sandbox):
    job = sandbox.start(Program(source="import time\nprint('begun', flush=True)\ntime.sleep(60)"))
    job.kill()
    job.kill()
    outcome = job.wait()
    assert outcome.ending is Ending.KILLED
    assert outcome.status == signal.SIGKILL
    job.kill()
    assert job.wait() == outcome


def test_another_thread_may_kill_what_is_waited_for(sandbox):
    job = sandbox.start(Program(source="import time\ntime.sleep(60)"))
    killer = threading.Timer(0.05, job.kill)
    killer.start()
    outcome = job.wait()
    killer.join()
    assert outcome.ending is Ending.KILLED
    assert sandbox.run(Program(source="print(1)")).stdout == b"1\n"


def test_its_streams_know_what_they_are(sandbox):
    source = "import sys\nprint([each.seekable() for each in (sys.stdin, sys.stdout, sys.stderr)], sys.stdin.read(2))"
    assert sandbox.run(Program(source=source, stdin=b"input")).stdout == b"[True, False, False] in\n"
    assert sandbox.run(Program(source="import os\nos.write(1, b'1')\nprint(2)")).stdout == b"12\n"


def test_nothing_of_python_runs_when_a_program_is_forked(sandbox):
    """What these two have registered for it costs as much as the fork."""
    source = "import sys\nprint(sorted({'random', 'threading'} & set(sys.modules)))"
    assert sandbox.run(Program(source=source)).stdout == b"[]\n"


def alone(source: str) -> str:
    """What a caller of a sandbox prints that has few threads and descriptors, however many this process has."""
    begin = "import os\nfrom proximo_verifiers.sandbox import jobs, runner\n"
    command = [sys.executable, "-c", begin + textwrap.dedent(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LATEST_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_descriptors_are_passed_under_the_numbers_asked_for():
    """The numbers cross over: 3 of the program is 4 of the caller's, or the other way round."""
    told = alone("""
        readers, writers = zip(*(os.pipe() for _ in range(2)))
        low, high = sorted(writers)
        source = "import os\\nos.write({}, b'to the low one')\\nos.write({}, b'to the high one')"
        program = jobs.Program(source=source.format(high, low), descriptors={high: low, low: high})
        with runner.Sandbox() as sandbox:
            job = sandbox.start(program)
            for descriptor in writers:
                os.close(descriptor)
            assert job.wait().status == 0
        for _, reader in sorted(zip(writers, readers)):
            print(os.read(reader, 99).decode())
    """)
    assert told == "to the low one\nto the high one\n"


def test_two_programs_talk_over_a_pipe(sandbox):
    reader, writer = os.pipe()
    listener = sandbox.start(Program(source="print(open(3).read().upper())", descriptors={3: reader}))
    speaker = sandbox.start(Program(source="open(3, 'w').write('hello')", descriptors={3: writer}))
    os.close(reader)
    os.close(writer)
    assert speaker.wait().status == 0
    assert listener.wait().stdout == b"HELLO\n"


def test_the_same_program_ends_the_same_way_every_time(sandbox):
    source = "print(set('abcdefgh'), hash('x'), {object: 1}.keys(), [c for c in {'p', 'q', 'r'}])"
    assert len({(each.ending, each.stdout) for each in (run(sandbox, source) for _ in range(5))}) == 1
    with Sandbox() as another:
        assert run(another, source).stdout == run(sandbox, source).stdout


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (Program(source="", descriptors={2: 0}), "descriptors must have numbers from 3"),
        (Program(source="", descriptors={64: 0}), "below limits.open_files"),
        (Program(source="", files={"../x": b""}), "plain names"),
        (Program(source="", files={"": b""}), "plain names"),
        (Program(source="", files={"x": bytes(17 << 20)}), "half of limits.scratch_bytes"),
        (Program(source="", limits=Limits(memory_bytes=1 << 20)), "limits.memory_bytes"),
        (Program(source="", limits=Limits(cpu_seconds=0)), "limits.cpu_seconds must be above 0, not 0"),
    ],
)
def test_a_program_that_cannot_be_meant_is_refused(sandbox, program, words):
    with pytest.raises(ValueError, match=words):
        sandbox.start(program)


def test_closing_ends_what_runs_and_leaves_nothing():
    sandbox = Sandbox()
    jobs = [sandbox.start(Program(source="while True: pass")) for _ in range(3)]
    server = sandbox._server.process.pid
    sandbox.close()
    sandbox.close()
    with pytest.raises(SandboxError, match="the sandbox was closed"):
        jobs[0].wait()
    assert not os.path.exists(f"/proc/{server}")


def test_a_fork_server_that_dies_is_a_fault_of_the_infrastructure_and_the_next_program_gets_another():
    with Sandbox() as sandbox:
        job = sandbox.start(Program(source="import time\ntime.sleep(60)"))
        os.killpg(sandbox._server.process.pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match="the fork server has ended"):
            job.wait()
        assert run(sandbox, "print(1)").stdout == b"1\n"


def test_nothing_outlives_a_caller_that_is_killed():
    source = """
        import time
        from sandbox_host import mark_processes
        mark = mark_processes()
        from proximo_verifiers.sandbox.jobs import Program
        from proximo_verifiers.sandbox.runner import Sandbox
        sandbox = Sandbox()
        jobs = [sandbox.start(Program(source="while True: pass")) for _ in range(2)]
        print(mark, flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(source)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as caller:
        assert caller.stdout is not None
        mark = int(caller.stdout.readline())
        assert len(processes_of(mark)) >= 5, "caller, two of the fork server, two programs"
        caller.kill()
    wait_until(lambda: processes_of(mark) == [], "the end of what the caller started")


def test_a_hundred_programs_leave_the_fork_server_and_the_caller_as_they_were(sandbox):
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{sandbox._server.process.pid}/task"))

    run(sandbox, "print(1)")
    before = count()
    for _ in range(100):
        assert run(sandbox, "print(1)").stdout == b"1\n"
    assert count() == before


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM])
def test_a_signal_that_the_caller_ignores_is_none_that_programs_ignore(whole_sandbox, number) -> None:
    """As a shell has a process ignore some that it starts in the background."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Sandbox() as made:
            found = made.start(Program(source=f"import os\nos.kill(os.getpid(), {int(number)})", limits=QUICK)).wait()
    finally:
        signal.signal(number, before)
    assert (found.ending, found.status) == (Ending.SIGNAL, number)


@pytest.fixture
def crowded(whole_sandbox: None) -> Iterator[None]:
    """One processor for this process and what it starts, with four others that always want it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    spinning = [sys.executable, "-S", "-c", "while True: pass"]
    # A session each: some kernels share a processor out by sessions.
    others = [subprocess.Popen(spinning, start_new_session=True) for _ in range(4)]
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.usefixtures("crowded")
def test_what_waits_for_a_processor_is_not_idle_and_what_sleeps_is():
    busy, asleep = alone("""
        limits = jobs.Limits(cpu_seconds=5.0, wall_seconds=120.0, idle_seconds=0.25)
        with runner.Sandbox() as sandbox:
            for does in ("while time.process_time() < 0.4: pass", "time.sleep(100)"):
                found = sandbox.run(jobs.Program(source=f"import time\\n{does}", limits=limits))
                print(found.ending.name, found.wall_seconds - found.cpu_seconds, found.lost_seconds)
    """).splitlines()
    ending, waited, lost = busy.split()
    assert (ending, asleep.split()[0]) == ("EXIT", "IDLE")
    assert float(waited) > 0.25, "it was kept waiting for longer than it may be idle"
    assert float(lost) > 0.25
