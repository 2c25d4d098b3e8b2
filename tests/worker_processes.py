"""The worker processes of a trainer, as the system lists them."""

from pathlib import Path


def workers_of(process: int) -> list[int]:
    """The worker processes that descend from this one, or were left to nobody."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = entry.joinpath("cmdline").read_bytes().split(b"\0")
            is_zombie = entry.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if b"proximo_verifiers.workers.main" in command and str(process).encode() in command and not is_zombie:
            found.append(int(entry.name))
    return found
