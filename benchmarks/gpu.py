"""PPO steps of Qwen2.5-shaped models on a GPU, Proximo beside TRL 1.12. Needs CUDA: without it, exits with 2.

    python benchmarks/peers/environments.py --environments runs/peers --peer trl-1.12
    python benchmarks/gpu.py --environments runs/peers

Random weights in the shapes of Qwen2.5-0.5B and 1.5B, bf16 over float32 weights, responses of up to 1024 tokens.
`batch`: 64 prompts, no response ends early. `ends`: likewise, each token ends its response with a probability of 1 in
300. `group`: 8 prompts with 8 responses each. Each side runs in a process of its own; one that fails, for want of
memory say, is named with the end of what it said. Printed are medians over steps, the first of a process left out:

- decode tokens/s, and beside it those that memory bandwidth allows: each pass reads the weights, and the keys and
  values of the rows that still grow, once, in bf16, at the rate of a copy measured here;
- MFU of training: the operations of its matrix products, forward and backward, of tokens that are not padding, over
  seconds and the rate of a large bf16 product measured here (or `--peak-tflops`);
- the peak of what torch had allocated.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import torch
from compare import HERE, SIDES, about, run
from environments import interpreter
from floor import Lengths, layer_products, training_flops
from stopwatch import PHASES
from work import SIZES, Job, Size, make_models

RESULTS = Path(__file__).parent / "results" / "gpu.json"
MODELS = ("qwen-0.5b", "qwen-1.5b")
PEERS = ("proximo", "trl-1.12")
STOP_PROBABILITY = 1 / 300
BF16_BYTES = 2


def cases(size: str, *, new_tokens: int = 1024) -> dict[str, Job]:
    """Name -> the work."""
    batch = Job(
        models="",
        size=size,
        regime="none",
        precision="bf16",
        prompt_tokens=128,
        new_tokens=new_tokens,
        epochs=1,
        device="cuda",
    )
    return {
        f"{size}-batch": batch,
        f"{size}-ends": replace(batch, regime="random"),
        f"{size}-group": replace(batch, num_prompts=8, group=8),
    }


def decode_bytes(size: Size, lengths: Lengths) -> float:
    """That a rollout must read: all weights for each pass, and what a row has of keys and values at each of its own.

    There are as many passes as the longest response has tokens; the first is that of the prompts, which reads no keys.
    """
    weights = size.layers * sum(count * a * b for count, a, b in layer_products(size)) + size.width * size.vocabulary
    per_token = 2 * size.layers * size.key_value_width
    seen = sum(
        (response - 1) * prompt + response * (response - 1) // 2
        for prompt, response in zip(lengths.prompts, lengths.responses, strict=True)
    )
    return BF16_BYTES * (max(lengths.responses) * weights + per_token * seen)


def bandwidth(device: str, *, num_bytes: int = 2**31) -> float:
    """Bytes per second, read and written, of a copy of so many."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _best_seconds(lambda: target.copy_(source), device)


def product_rate(device: str, *, width: int = 8192) -> float:
    """Operations per second of a square bf16 product."""
    a, b = (torch.randn(width, width, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * width**3 / _best_seconds(lambda: a @ b, device)


def _best_seconds(work: Callable[[], Any], device: str) -> float:
    """Of ten, after one that does not count."""
    found = []
    for _ in range(11):
        start = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return min(found[1:])


def row(job: Job, steps: list[Mapping[str, Any]], *, bytes_per_second: float, flops_per_second: float) -> list[float]:
    """Of a side: seconds by phase and of the step, decode tokens/s, their share of the floor's, MFU, tokens."""
    prompts = [len(prompt) for prompt in job.prompts() for _ in range(job.group)]
    found = []
    for step in steps:
        lengths = Lengths(prompts, step["lengths"])
        tokens, seconds = sum(lengths.responses), [step[phase] for phase in PHASES]
        allowed = tokens / (decode_bytes(SIZES[job.size], lengths) / bytes_per_second)
        reached = tokens / step["rollout"]
        used = training_flops(job, lengths) / step["training"] / flops_per_second
        found.append([*seconds, sum(seconds), reached, reached / allowed, used, tokens])
    return [statistics.median(column) for column in zip(*found, strict=True)]


def attempt(side: str, file: Path, options: argparse.Namespace, log: Path) -> dict[str, Any]:
    """What a side found, or how it failed."""
    python = sys.executable if side == "proximo" else interpreter(options.environments, side)
    try:
        return run([python, HERE / SIDES[side], file], threads=os.cpu_count() or 1, log=log)
    except SystemExit as problem:
        return {"failed": str(problem).strip().splitlines()[-1]}


def measure(results: dict[str, Any], options: argparse.Namespace) -> None:
    """What is missing; saved after each side."""
    work = options.environments / "work"
    work.mkdir(parents=True, exist_ok=True)
    rates = {
        "bytes_per_second": bandwidth("cuda"),
        "flops_per_second": options.peak_tflops * 1e12 if options.peak_tflops else product_rate("cuda"),
    }
    for size in options.size or MODELS:
        for name, plain in cases(size).items():
            models = work / f"models-{size}-{plain.regime}"
            if not (models / "tokenizer" / "tokenizer_config.json").is_file():
                models.mkdir(parents=True, exist_ok=True)
                make_models(models, SIZES[size], regime=plain.regime, stop_probability=STOP_PROBABILITY)
            job = replace(plain, models=str(models.resolve()), steps=options.steps)
            file = job.save(work / f"{name}.json")
            case = results.setdefault(name, {"job": {**json.loads(file.read_text()), "models": models.name}})
            for side in PEERS:
                if side in case or (options.side and side not in options.side):
                    continue
                found = attempt(side, file, options, work / f"{name}-{side}.log")
                place = about(os.cpu_count() or 1) | {"machine": torch.cuda.get_device_name()}
                case[side] = {"about": place, "rates": rates, **found}
                options.results.write_text(json.dumps(results, indent=1) + "\n")


def print_tables(results: Mapping[str, Mapping[str, Any]]) -> None:
    """One for each case; `times` is the side's seconds per response token in those of Proximo."""
    for name, case in results.items():
        job, there = Job(**case["job"]), [side for side in PEERS if side in case]
        place = case[there[0]]["about"]
        print(f"\n**{name}** — {place['date']}, {place['machine']}, commit {place['commit']}\n")
        print(
            "| | rollout, s | scoring, s | training, s | step, s | decode tokens/s | of what bandwidth allows | "
            "MFU of training | peak, GiB | times |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|")
        rows = {side: row(job, case[side]["steps"], **case[side]["rates"]) for side in there if "steps" in case[side]}
        per_token = {side: found[3] / found[-1] for side, found in rows.items()}
        for side in there:
            if side not in rows:
                print(f"| {side} | failed: {case[side]['failed']} |" + " |" * 8)
                continue
            *seconds, speed, share, used, _ = rows[side]
            times = f"{per_token[side] / per_token['proximo']:.2f}" if "proximo" in per_token else ""
            print(
                f"| {side} | "
                + " | ".join(f"{each:.2f}" for each in seconds)
                + f" | {speed:.0f} | {share:.0%} | {used:.0%} | {case[side]['peak_mib'] / 1024:.1f} | {times} |"
            )


def main() -> None:
    """Measure what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=Path("runs/peers"), help="as environments.py made them")
    parser.add_argument("--size", action="append", choices=MODELS, help="only this one; may be given again")
    parser.add_argument("--side", action="append", choices=PEERS, help="only this one; may be given again")
    parser.add_argument("--steps", type=int, default=2, help="steps that count in each process")
    parser.add_argument("--peak-tflops", type=float, help="what MFU is a share of, of bf16 products, from a datasheet")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--print", action="store_true", help="print what the results have, and measure nothing")
    options = parser.parse_args()
    options.environments = options.environments.resolve()
    results = json.loads(options.results.read_text()) if options.results.is_file() else {}
    if not options.print:
        if not torch.cuda.is_available():
            print("this benchmark needs a GPU with CUDA, and torch finds none: nothing was measured", file=sys.stderr)
            raise SystemExit(2)
        measure(results, options)
    print_tables(results)


if __name__ == "__main__":
    main()
