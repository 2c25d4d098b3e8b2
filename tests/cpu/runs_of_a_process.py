"""SFT, PPO and the doctor; without the package proximo_cpu, as a program, also PPO that is resumed, and generation.

Its arguments: a folder with the inputs of `tiny_runs.py`, and one for the runs.
"""

import importlib.metadata
import sys
from pathlib import Path
from typing import Any


def hide_the_package() -> None:
    """As where it is not installed: no entry point, and nothing to import. Comes before the core is imported."""
    found = importlib.metadata.entry_points
    hidden = {"group": "proximo.fast_paths", "name": "cpu"}
    importlib.metadata.entry_points = lambda **asked: () if asked == hidden else found(**asked)
    sys.modules["proximo_cpu"] = None  # type: ignore[assignment]


def fail(step: int, _: Any) -> None:
    """In the third step, of which nothing is saved."""
    if step == 3:
        raise RuntimeError("the machine is gone")


def run_all(inputs: Path, folder: Path, *, hidden: bool) -> None:
    from proximo.cli import main
    from proximo.run.options import RunOptions
    from tiny_runs import Kind, changed, recipe_of, run

    def train(kind: Kind, name: str, options: RunOptions) -> None:
        assert run(kind, changed(recipe_of(kind, inputs), {"run.folder": str(folder / name)}), options) == 0

    train("sft", "sft", RunOptions())
    train("ppo", "whole", RunOptions())
    if hidden:
        try:
            train("ppo", "resumed", RunOptions(on_step=fail))
        except RuntimeError:
            train("ppo", "resumed", RunOptions(resume="must"))
        assert main(["generate", str(folder / "whole"), "ab cd", "--max-new-tokens", "4"]) == 0
    assert main(["doctor"]) == 0
    loaded = [name for name, module in sys.modules.items() if name.startswith("proximo_cpu") and module is not None]
    assert bool(loaded) != hidden, loaded


if __name__ == "__main__":
    hide_the_package()
    run_all(Path(sys.argv[1]), Path(sys.argv[2]), hidden=True)
