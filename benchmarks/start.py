"""Seconds until the trainer is imported, and until `proximo ppo` prints the line of its first step, beside the floor.

The floor is what every program pays that trains a model of transformers: importing torch and the model's class. All
rows are measured in turn, `--rounds` times: python benchmarks/start.py
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

RECIPE = """
run: {folder: runs/ppo, device: cpu}
model: {path: policy}
value: {init_from: reward}
data:
  sources:
    - {function: "proximo.recipes.reviews.review_rows:prompt_rows", kwargs: {num_rows: 32, seed: 2}}
  held_out_rows: 4
  max_prompt_tokens: 40
reward:
  - {kind: model, path: reward}
ppo: {num_steps: 1, prompts_per_step: 4, epochs_per_step: 1, minibatch_responses: 2, rollout: {max_new_tokens: 12}}
"""
FLOOR = "import torch; from transformers import LlamaForCausalLM"
IMPORTS = {
    "import torch": "import torch",
    "import torch, transformers": "import torch, transformers",
    "from transformers import LlamaForCausalLM": FLOOR,
    "from proximo import PPOTrainer": "from proximo import PPOTrainer",
}
FIRST_LINE = "step 1/"


def proximo(*arguments: str, folder: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "proximo", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=300
    )


def prepare(folder: Path) -> None:
    """Models of one layer of width 32, and a recipe for them."""
    proximo("pipeline", "tiny", "run.folder=runs/tiny", "-q", folder=folder)
    for stage, name in (("sft", "policy"), ("reward", "reward")):
        proximo("export", f"runs/tiny/{stage}", name, folder=folder)
    (folder / "ppo.yaml").write_text(RECIPE, encoding="utf-8")


def seconds_of(program: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    return time.perf_counter() - start


def seconds_to_first_line(folder: Path, environment: Mapping[str, str]) -> float:
    command = [sys.executable, "-m", "proximo", "ppo", "ppo.yaml", "--overwrite"]
    start = time.perf_counter()
    with subprocess.Popen(
        command, cwd=folder, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        seconds = next(time.perf_counter() - start for line in process.stdout if line.startswith(FIRST_LINE))
        process.stdout.read()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    taken: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder)
        for number in range(rounds + 1):  # the first one warms up
            seconds = {name: seconds_of(program) for name, program in IMPORTS.items()}
            seconds["first step of proximo ppo"] = seconds_to_first_line(folder, os.environ)
            empty = os.environ | {"XDG_CACHE_HOME": str(folder / f"cache-{number}")}
            seconds["the same, kernels not compiled before"] = seconds_to_first_line(folder, empty)
            for name, value in seconds.items() if number else ():
                taken.setdefault(name, []).append(value)
    for name, values in taken.items():
        print(f"{name:<42} {statistics.median(values):5.2f} s ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
