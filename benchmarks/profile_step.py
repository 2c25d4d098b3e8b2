"""Where the time of a PPO step goes: operators, Python between them, allocations, and what is over the floor.

    python benchmarks/profile_step.py --size S --regime eos --threads 2

Models and prompts are those of `peers/work.py`. One step warms up, one is timed alone, one is timed under torch's
profiler, with policy and value model one after the other. The profiler slows operators down, most of all small ones, so
shares are read from its table and seconds from the step without it. "Between operators" is the time of a call in which
none ran: Python, and the profiler's own.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from floor import Lengths, floor_seconds, measure_rates
from side_proximo import PHASE_OF, config_of, make_trainer
from stopwatch import PHASES
from work import SIZES, Job, make_models

from proximo.ppo.calls import Calls


class Marked(Calls):
    """Names the calls in the profile, while one is taken."""

    marks: ClassVar[bool] = False

    def run(self, name: str, function: Callable[..., Any], *inputs: Any) -> Any:
        """The result, under its name."""
        with record_function(f"call {name}") if self.marks else contextlib.nullcontext():
            return super().run(name, function, *inputs)


def operator_table(taken: profile, *, rows: int) -> Iterator[list[str]]:
    """Name, calls, milliseconds of its own, share, mebibytes that it allocated: what takes most comes first."""
    events = [event for event in taken.key_averages() if not event.key.startswith("call ")]
    total = sum(event.self_cpu_time_total for event in events)
    for event in sorted(events, key=lambda event: -event.self_cpu_time_total)[:rows]:
        yield [
            event.key,
            str(event.count),
            f"{event.self_cpu_time_total / 1e3:.1f}",
            f"{100 * event.self_cpu_time_total / total:.1f} %",
            f"{max(0, event.self_cpu_memory_usage) / 2**20:.0f}",
        ]


def call_table(taken: profile) -> Iterator[list[str]]:
    """Of each call of the step: milliseconds, operators, and the share between operators."""
    events = {event.key: event for event in taken.key_averages() if event.key.startswith("call ")}
    for name, event in events.items():
        between = event.self_cpu_time_total / max(event.cpu_time_total, 1)
        yield [name.removeprefix("call "), f"{event.cpu_time_total / 1e3:.0f}", f"{100 * between:.0f} %"]


def print_table(head: list[str], rows: Iterator[list[str]]) -> None:
    """As Markdown."""
    print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def print_floor(job: Job, outcome: Any) -> None:
    """Seconds of each phase of the step that was not profiled, beside its floor."""
    responses = [scored.response for scored in outcome.experience.scored]
    lengths = Lengths([len(r.prompt.token_ids) for r in responses], [len(r.token_ids) for r in responses])
    share = job.minibatch / len(responses)
    rates = measure_rates(
        job,
        decode_rows=job.num_responses,
        tokens=round(share * sum(lengths.whole)),
        responses=round(share * sum(lengths.responses)),
    )
    floor = floor_seconds(job, lengths, rates)
    found = dict.fromkeys(PHASES, 0.0)
    for call, seconds in outcome.seconds.items():
        found[PHASE_OF.get(call, "training")] += seconds
    rows = [[p, f"{found[p]:.3f}", f"{floor[p]:.3f}", f"{found[p] / floor[p]:.2f}"] for p in PHASES]
    whole, least = sum(found.values()), sum(floor.values())
    rows.append(["step", f"{whole:.3f}", f"{least:.3f}", f"{whole / least:.2f}"])
    print_table(["phase", "seconds", "floor, s", "measured / floor"], iter(rows))


def main() -> None:
    """Take three steps and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[*SIZES], default="S")
    parser.add_argument("--regime", choices=["none", "eos"], default="eos")
    parser.add_argument("--precision", choices=["float32", "bf16"], default="float32")
    parser.add_argument("--adapter-rank", type=int, default=0, help="of LoRA; 0 trains in full")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=25, help="operators in the table")
    parser.add_argument("--trace", type=Path, help="write the trace there, for chrome://tracing")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder), SIZES[options.size], regime=options.regime)
        job = Job(
            folder,
            options.size,
            options.regime,
            precision=options.precision,
            threads=options.threads,
            steps=3,
            adapter_rank=options.adapter_rank,
        )
        trainer, prompts = make_trainer(job)
        # The profiler sees one thread, so what it sees runs there, policy before value model.
        config = config_of(job)
        profiled, _ = make_trainer(job, config=config)
        profiled.calls_type = Marked
    trainer.run_step(prompts=prompts)
    print_floor(job, trainer.run_step(prompts=prompts))
    profiled.run_step(prompts=prompts)
    Marked.marks = True
    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as taken:
        profiled.run_step(prompts=prompts)
    print(f"\nunder the profiler the step took {time.perf_counter() - start:.2f} s")
    print_table(["call", "ms", "between operators"], call_table(taken))
    print_table(["operator", "calls", "ms", "of all", "MiB allocated"], operator_table(taken, rows=options.rows))
    if options.trace is not None:
        taken.export_chrome_trace(str(options.trace))


if __name__ == "__main__":
    main()
