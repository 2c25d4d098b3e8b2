"""Seconds and memory of a PPO step of the embedded example by phase, with the matrix floor of its training beside them.

    python benchmarks/ppo_step.py --run runs/benchmark/seed-0/ppo --steps 6

The folder is a finished PPO stage of the demo: its recipe is taken, its models are where the recipe names them. Memory
is the resident set of the process, looked at every 2 ms while a phase runs.
"""

import argparse
import json
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

from proximo.data.order import rows_at
from proximo.ppo import from_recipe
from proximo.ppo.calls import Calls
from proximo.ppo.recipe import PPORecipe

PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20
LOOK_SECONDS = 0.002


class Watched(Calls):
    """Notes how long each call takes and how much memory the process has meanwhile, over all steps."""

    all_seconds: ClassVar[dict[str, list[float]]] = defaultdict(list)
    peaks: ClassVar[dict[str, list[float]]] = defaultdict(list)

    def run(self, name: str, function: Callable[..., Any], *inputs: Any) -> Any:
        """The result, with a thread beside it that looks at the memory."""
        done, seen = threading.Event(), [resident_mib()]

        def look() -> None:
            while not done.wait(LOOK_SECONDS):
                seen.append(resident_mib())

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        start = time.perf_counter()
        try:
            return super().run(name, function, *inputs)
        finally:
            self.all_seconds[name].append(time.perf_counter() - start)
            done.set()
            watcher.join()
            self.peaks[name].append(max(seen))


def resident_mib() -> float:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_MIB


def matrix_rate(width: int = 512) -> float:
    """Floating-point operations per second of a float32 product, the best of ten."""
    a, b = torch.randn(width, width), torch.randn(width, width)
    best = 1e9
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(10):
            a @ b
        best = min(best, (time.perf_counter() - start) / 10)
    return 2 * width**3 / best


def main() -> None:
    """Take some steps and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="a finished PPO stage of the demo")
    parser.add_argument("--steps", type=int, default=6, help="steps to take; the first is left out")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = json.loads((options.run / "config.resolved.json").read_text())
    settings["run"]["num_threads"] = options.threads
    recipe = PPORecipe.model_validate(settings)
    task = from_recipe.build_task(recipe)
    trainer, before, tokens = task.ppo, resident_mib(), []
    trainer.calls_type = Watched
    for step in range(options.steps):
        size = recipe.ppo.prompts_per_step
        rows = rows_at(step * size, size, num_rows=len(task.prompts), seed=recipe.run.seed)
        outcome = trainer.run_step(prompts=[task.prompts[row] for row in rows])
        scored = outcome.experience.scored
        tokens.append(sum(len(s.response.prompt.token_ids) + len(s.response.token_ids) for s in scored))
    print(f"loaded: {before:.0f} MiB resident\n\n| phase | median seconds | peak MiB above that |\n|---|---|---|")
    for name, seconds in Watched.all_seconds.items():
        print(f"| {name} | {statistics.median(seconds[1:]):.3f} | {max(Watched.peaks[name]) - before:.0f} |")
    whole = [sum(parts) for parts in zip(*Watched.all_seconds.values(), strict=True)]
    print(f"| whole step | {statistics.median(whole[1:]):.3f} | |\n")
    parameters = sum(p.numel() for p in trainer.policy.model.parameters())
    operations = 6 * parameters * statistics.median(tokens[1:]) * recipe.ppo.epochs_per_step
    floor = operations / matrix_rate()
    training = statistics.median(Watched.all_seconds["train_policy"][1:])
    print(
        f"training of the policy: {statistics.median(tokens[1:]):.0f} tokens x {recipe.ppo.epochs_per_step} epochs, "
        f"{operations / 1e9:.1f} GFLOP of matrices, {floor:.3f} s at the rate of a {512}-wide product: "
        f"measured / floor {training / floor:.2f}"
    )


if __name__ == "__main__":
    main()
