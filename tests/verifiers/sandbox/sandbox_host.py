"""The host that hostile programs meet: a secret file, servers, a victim process; and what is left on it afterwards."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sandbox_cases import SECRET, TOKEN

from proximo_verifiers.sandbox import runner

WATCHED_FOLDERS = ("/tmp", "/dev/shm", "/var/tmp", "/", "/dev", "/run", "/dev/mqueue")


@dataclass(kw_only=True)
class Host:
    """What is set up for programs to find, in a folder that they must not reach."""

    folder: Path
    tcp: socket.socket
    unix: socket.socket
    abstract: socket.socket
    victim: subprocess.Popen[bytes]

    def name_places(self, source: str) -> str:
        """The source with the names of what is here in place of the words in capitals."""
        places = {
            "FOLDER": str(self.folder),
            "PORT": str(self.tcp.getsockname()[1]),
            "VICTIM": str(self.victim.pid),
            "PARENT": str(os.getpid()),
            "TESTS": str(Path(__file__).parent),
            "PROJECT": str(Path(runner.__file__).parents[1]),
        }
        for word, place in places.items():
            source = source.replace(word, place)
        return source

    def changes(self) -> list[str]:
        """What hostile programs did to it."""
        secret = self.folder / "secret.txt"
        files = sorted(path.name for path in self.folder.iterdir() if not path.name.startswith("proximo-sandbox-"))
        checks = {
            "somebody has connected": not any(map(_has_caller, (self.tcp, self.unix, self.abstract))),
            "the victim was ended": self.victim.poll() is None,
            "the secret was changed": secret.read_text() == SECRET and secret.stat().st_mode & 0o777 == 0o644,
            f"the folder has changed: {files}": files == ["listening", "secret.txt"],
            f"left behind: {_left_behind()}": not _left_behind(),
        }
        return [what for what, good in checks.items() if not good]

    def close(self) -> None:
        """Ends what was set up."""
        self.victim.kill()
        self.victim.wait()
        for each in (self.tcp, self.unix, self.abstract):
            each.close()


def make_host(folder: Path) -> Host:
    """In an empty folder."""
    (folder / "secret.txt").write_text(SECRET)
    (folder / "secret.txt").chmod(0o644)
    tcp = socket.create_server(("127.0.0.1", 0))
    unix, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    unix.bind(str(folder / "listening"))
    abstract.bind(f"\0proximo-host-{tcp.getsockname()[1]}")
    for each in (tcp, unix, abstract):
        each.listen()
        each.setblocking(False)
    victim = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
    return Host(folder=folder, tcp=tcp, unix=unix, abstract=abstract, victim=victim)


def shared_objects() -> dict[str, str]:
    """The machine's System V objects and the environment of this process."""
    tables = {name: Path(f"/proc/sysvipc/{name}").read_text() for name in ("shm", "sem", "msg")}
    return {**tables, "environment": repr(sorted(os.environ.items()))}


def mark_processes() -> int:
    """Marks this process and all that it will ever start: by a limit that Linux hands down and does not enforce."""
    mark = 2**40 + int.from_bytes(os.urandom(4), "little")
    resource.setrlimit(resource.RLIMIT_RSS, (mark, resource.getrlimit(resource.RLIMIT_RSS)[1]))
    return mark


def processes_of(mark: int) -> list[int]:
    """Processes that have the mark, but for this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f" {mark} " in (entry / "limits").read_text():
                    found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def _has_caller(listening: socket.socket) -> bool:
    try:
        listening.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def _left_behind() -> list[str]:
    found = [line for line in Path("/proc/net/unix").read_text().splitlines() if TOKEN in line]
    for folder in WATCHED_FOLDERS:
        with contextlib.suppress(OSError):
            found += [f"{folder}/{name}" for name in os.listdir(folder) if TOKEN in name]
    return found
