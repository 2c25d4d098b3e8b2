"""How time and memory of a PPO step grow with response length, group, batch, vocabulary and model size.

    python benchmarks/scaling.py                        all sweeps; goes on where it was stopped
    python benchmarks/scaling.py --sweep vocabulary --plots-only

Each point is a process of its own: random models in memory, one step that warms up and `--steps` that count, no
response ending early. Results go to `results/scaling.json` after every point, plots to `results/scaling-*.svg`: both
axes are logarithmic, and the dashed line grows as the matrix products of the step do (or as the memory that a formula
gives, where a sweep has one).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from endings import EOS_ID, PAD_ID, forbid_ends
from floor import Lengths, flops
from stopwatch import PHASES, Stopwatch
from work import SIZES, Job, Size, model_config

RESULTS = Path(__file__).parent / "results"
MIB = 2**20


@dataclass(frozen=True)
class Point:
    """One measured step."""

    value: int
    """On the horizontal axis."""
    size: Size
    num_prompts: int = 16
    group: int = 1
    prompt_tokens: int = 32
    new_tokens: int = 32

    @property
    def job(self) -> Job:
        """Its step in the words of the peers' benchmark: one epoch, four minibatches."""
        return Job(
            models="",
            size="",
            regime="none",
            num_prompts=self.num_prompts,
            group=self.group,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            epochs=1,
            minibatch=max(1, self.num_prompts * self.group // 4),
        )


def parameters(size: Size, *, head: bool) -> int:
    """Weights of a model, with the output layer of a language model or without."""
    layer = 4 * size.width**2 + 3 * size.width * size.mlp + 2 * size.width
    return size.layers * layer + size.width + size.vocabulary * size.width * (2 if head else 1)


def state_bytes(size: Size) -> int:
    """Weights of the four models; gradients and two moments of the two that train. float32."""
    language, scalar = parameters(size, head=True), parameters(size, head=False)
    return 4 * (2 * language + 2 * scalar + 3 * language + 3 * scalar)


def sweeps() -> dict[str, list[Point]]:
    """Name -> points, from small to large; all but one number of a sweep stay."""
    small = SIZES["S"]
    return {
        "response-length": [
            Point(n, small, num_prompts=8, new_tokens=n) for n in (64, 128, 256, 512, 1024, 2048, 4096)
        ],
        "group": [Point(n, small, num_prompts=4, group=n, prompt_tokens=256) for n in (1, 2, 4, 8, 16, 32)],
        "batch": [Point(n, small, num_prompts=n) for n in (4, 8, 16, 32, 64, 128, 256)],
        "vocabulary": [Point(n, replace(small, vocabulary=n)) for n in (2_000, 8_000, 32_000, 64_000, 150_000)],
        "parameters": [
            Point(parameters(size, head=True), size)
            for size in (
                Size(vocabulary=2048, width=width, layers=layers, heads=width // 64, mlp=width * 43 // 16)
                for width, layers in ((128, 2), (256, 4), (512, 8), (768, 12))
            )
        ],
        "tiny": [Point(n, SIZES["tiny"], num_prompts=4, new_tokens=n) for n in (4, 8)],  # a smoke test
    }


def measure(point: Point, *, steps: int, threads: int) -> None:
    """In a fresh process: take the steps and print what they needed."""
    import torch
    from side_proximo import PHASE_OF, config_of
    from tokenizers import Tokenizer, models
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from proximo.models.language import LanguageModel
    from proximo.models.scalar import HeadStart, scalar_from_language_model
    from proximo.ppo.trainer import PPOTrainer
    from proximo.records import Prompt
    from proximo.rewards.model import ModelReward

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    watch = Stopwatch()
    job = replace(point.job, steps=steps)
    policy = LanguageModel(LlamaForCausalLM(model_config(point.size)).eval())
    forbid_ends(policy.base)
    core = Tokenizer(models.WordLevel({"<pad>": PAD_ID, "<eos>": EOS_ID, "a": 2}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    reward = scalar_from_language_model(policy, HeadStart.NORMAL, seed=1)
    trainer = PPOTrainer(policy, tokenizer, reward=ModelReward(reward), config=config_of(job))
    prompts = [
        Prompt(id=str(index), token_ids=tuple((7 * index + place) % 999 % point.size.vocabulary for place in range(32)))
        for index in range(point.num_prompts)
    ]
    prompts = [replace(p, token_ids=(p.token_ids * point.prompt_tokens)[: point.prompt_tokens]) for p in prompts]
    for _ in range(steps + 1):
        outcome = trainer.run_step(prompts=prompts)
        seconds = dict.fromkeys(PHASES, 0.0)
        for call, took in outcome.seconds.items():
            phase = "advantages" if call == "experience" else PHASE_OF.get(call, "training")
            seconds[phase] = seconds.get(phase, 0.0) + took
        watch.add(seconds, [len(scored.response.token_ids) for scored in outcome.experience.scored])
    watch.report("torch", "transformers")


def taken(point: Point, *, sweep: str, options: argparse.Namespace) -> dict[str, Any]:
    """What a process of its own found: medians of the seconds, the peak, and what formulas say."""
    number = str(options.threads)
    command = [sys.executable, __file__, "--sweep", sweep, "--measure", str(point.value)]
    command += ["--steps", str(options.steps), "--threads", number]
    environment = {**os.environ, "OMP_NUM_THREADS": number}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found = json.loads(done.stdout.splitlines()[-1])
    phases = [name for name in found["steps"][0] if name != "lengths"]
    num_responses = point.num_prompts * point.group
    lengths = Lengths([point.prompt_tokens] * num_responses, [point.new_tokens] * num_responses)
    return {
        "value": point.value,
        "seconds": {name: statistics.median(step[name] for step in found["steps"]) for name in phases},
        "peak_mib": found["peak_mib"],
        "state_mib": state_bytes(point.size) / MIB,
        "gflop": flops(point.job, lengths, size=point.size) / 1e9,
    }


def plot(name: str, points: list[dict[str, Any]]) -> None:
    """Seconds by phase on the left, memory on the right."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    values = [point["value"] for point in points]
    for phase in points[0]["seconds"]:
        left.plot(values, [point["seconds"][phase] for point in points], marker=".", label=phase)
    whole = [sum(point["seconds"].values()) for point in points]
    scale = whole[-1] / points[-1]["gflop"]
    left.plot(values, [scale * point["gflop"] for point in points], "k--", label="as the matrix products")
    left.set(xscale="log", yscale="log", xlabel=name, ylabel="seconds")
    right.plot(values, [point["peak_mib"] for point in points], marker=".", label="peak")
    right.plot(values, [point["state_mib"] for point in points], "k--", label="weights, gradients, moments")
    right.set(xscale="log", yscale="log", xlabel=name, ylabel="MiB")
    for axes in (left, right):
        axes.legend(fontsize="x-small")
    figure.savefig(RESULTS / f"scaling-{name}.svg", metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Measure what is missing, then draw."""
    every = sweeps()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="append", choices=[*every], help="only this one; may be given again")
    parser.add_argument("--steps", type=int, default=2, help="steps that count at each point")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--results", type=Path, default=RESULTS / "scaling.json")
    parser.add_argument("--plots-only", action="store_true", help="draw what is there, and measure nothing")
    parser.add_argument("--measure", type=int, metavar="VALUE", help="what a point's process is started with")
    options = parser.parse_args()
    chosen = options.sweep or [name for name in every if name != "tiny"]
    if options.measure is not None:
        point = next(each for each in every[chosen[0]] if each.value == options.measure)
        measure(point, steps=options.steps, threads=options.threads)
        return
    results = json.loads(options.results.read_text()) if options.results.is_file() else {}
    for name in chosen:
        known = results.setdefault(name, {"threads": options.threads, "points": []})
        for point in every[name]:
            if options.plots_only or any(each["value"] == point.value for each in known["points"]):
                continue
            known["points"].append(taken(point, sweep=name, options=options))
            known["date"] = datetime.now(UTC).date().isoformat()
            options.results.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{name} {point.value}: {json.dumps(known['points'][-1])}", flush=True)
        if known["points"]:
            plot(name, known["points"])


if __name__ == "__main__":
    main()
