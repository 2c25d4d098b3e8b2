"""What a group of responses to one prompt costs, beside one response and beside the same group without sharing.

    python benchmarks/shared_prompts.py                 size S, 16 responses of 64 tokens to a prompt of 1,024
    python benchmarks/shared_prompts.py --size M --threads 1

Random models in memory; a pass without gradients (log-probs, values) and one with its backward pass, on all rows in one
micro-batch. Times are medians of interleaved rounds; memory is the growth of a process in one training pass.
Operations are counted by formula: matrix products (twice as many backwards), and attention over full squares.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import torch
from transformers import AutoModelForCausalLM
from work import SIZES, Size, model_config

from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, pack_responses
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model

KINDS = ("one response", "group", "group, not shared")


def batch_of(kind: str, given: argparse.Namespace) -> PackedResponses:
    """Prompts that differ in their first token share nothing."""
    count = 1 if kind == "one response" else given.group
    first = range(count) if kind == "group, not shared" else [0] * count
    prompts = [[3 + number, *(3 + i % 200 for i in range(1, given.prompt))] for number in first]
    responses = [[3 + (7 * i + row) % 200 for i in range(given.new)] for row in range(count)]
    return pack_responses(prompts, responses)


def operations(kind: str, given: argparse.Namespace, size: Size, *, head: bool) -> float:
    """Of a forward pass."""
    count, whole = 1 if kind == "one response" else given.group, given.prompt + given.new
    if kind == "group":
        tokens = given.prompt - 1 + count * (given.new + 1)
        squares = (given.prompt - 1) ** 2 + count * (given.new + 1) * whole
    else:
        tokens, squares = count * whole, count * whole**2
    layer = 2 * size.width**2 + 2 * size.width * size.key_value_width + 3 * size.width * size.mlp
    logits = count * given.new * size.width * size.vocabulary if head else 0
    return 2 * (size.layers * (tokens * layer + 2 * squares * size.width) + logits)


def passes(role: str, size: Size) -> tuple[torch.nn.Module, Callable[[PackedResponses], torch.Tensor]]:
    """The module of a role, and its pass."""
    torch.manual_seed(0)
    policy = LanguageModel(AutoModelForCausalLM.from_config(model_config(size)).eval())
    if role == "policy":
        return policy.model, lambda batch: policy.response_logprobs(batch).logprobs
    critic: ScalarModel = scalar_from_language_model(policy, HeadStart.NORMAL)
    return critic.model, critic.response_values


def take(run: Callable[[PackedResponses], torch.Tensor], batch: PackedResponses, *, train: bool) -> float:
    """Seconds of one pass; of CPU time where torch has one thread, which other processes do not lengthen by waiting."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    with torch.set_grad_enabled(train):
        result = run(batch)
        if train:
            result.sum().backward()
    return clock() - begin


def megabytes(role: str, kind: str, given: argparse.Namespace) -> float:
    """By how much a process of its own grows in a training pass."""
    command = [sys.executable, __file__, "--measure", role, kind, *(f"--size={given.size}", f"--group={given.group}")]
    command += [f"--prompt={given.prompt}", f"--new={given.new}"]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(role: str, kind: str, given: argparse.Namespace) -> None:
    """Print the growth of this process."""
    _, run = passes(role, SIZES[given.size])
    take(run, pack_responses([[3, 4]], [[5, 6]]), train=True)
    Path("/proc/self/clear_refs").write_text("5")  # the largest size so far becomes that of now
    before = resident("VmRSS")
    take(run, batch_of(kind, given), train=True)
    print((resident("VmHWM") - before) / 1024)


def resident(field: str) -> int:
    """KiB of this process, of now or at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="S")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--measure", nargs=2, metavar=("ROLE", "KIND"))
    given = parser.parse_args()
    if given.measure:
        measure(*given.measure, given)
        return
    torch.set_num_threads(given.threads)
    size = SIZES[given.size]
    print("| role | pass | rows | operations, by one response's | seconds | by one response's | MiB |")
    print("|---|---|---|---|---|---|---|")
    for role in ("policy", "critic"):
        module, run = passes(role, size)
        batches = {kind: batch_of(kind, given) for kind in KINDS}
        memory = {kind: megabytes(role, kind, given) for kind in KINDS}
        for train in (False, True):
            seconds = {kind: list[float]() for kind in KINDS}
            for _ in range(given.rounds):
                for kind, batch in batches.items():
                    seconds[kind].append(take(run, batch, train=train))
                    module.zero_grad()
            medians = {kind: statistics.median(each) for kind, each in seconds.items()}
            counted = {kind: operations(kind, given, size, head=role == "policy") for kind in KINDS}
            for kind in KINDS:
                row = [role, "training" if train else "scoring", kind]
                row += [f"{counted[kind] / counted[KINDS[0]]:.2f}", f"{medians[kind]:.3f}"]
                row += [f"{medians[kind] / medians[KINDS[0]]:.2f}", f"{memory[kind]:.0f}" if train else ""]
                print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
