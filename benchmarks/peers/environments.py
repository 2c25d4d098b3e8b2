"""Make the isolated environments of the peers.

    python benchmarks/peers/environments.py --environments runs/peers

Each gets a virtual environment of its own from `requirements/`: torch first, since a range with no torch installed
pulls gigabytes of CUDA, then all of the file, which holds torch where it is. `--index` takes another index of
packages for torch, such as https://download.pytorch.org/whl/cpu where the machine's own one has CUDA builds.
"""

import argparse
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"
PEERS = tuple(sorted(path.stem for path in REQUIREMENTS.glob("*.txt")))


def interpreter(environments: Path, peer: str) -> Path:
    """Python of a peer's environment."""
    return environments / peer / "bin" / "python"


def make(environments: Path, peer: str, *, index: str | None) -> None:
    """Raises CalledProcessError where pip fails."""
    wanted = REQUIREMENTS / f"{peer}.txt"
    python = interpreter(environments, peer)
    done = environments / peer / "requirements.txt"
    if done.is_file() and done.read_text() == wanted.read_text():
        print(f"{peer}: is there")
        return
    print(f"{peer}: makes {python}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(environments / peer)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    (torch,) = (line for line in wanted.read_text().splitlines() if line.startswith("torch=="))
    subprocess.run([*pip, torch, *(["--index-url", index] if index else [])], check=True)
    subprocess.run([*pip, "--constraint", str(wanted), "--requirement", str(wanted)], check=True)
    done.write_text(wanted.read_text())


def main() -> None:
    """Make those that are not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=Path("runs/peers"), help="folder of the environments")
    parser.add_argument("--peer", action="append", choices=PEERS, help="only this one; may be given again")
    parser.add_argument("--index", help="index of packages that torch is taken from")
    options = parser.parse_args()
    for peer in options.peer or PEERS:
        make(options.environments, peer, index=options.index)


if __name__ == "__main__":
    main()
