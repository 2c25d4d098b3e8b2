"""What one draw costs, and how often a draw changes when logits change by rounding: exponential race or inverse CDF.

    python benchmarks/sampling.py

One thread. Times are CPU time per row; flips are draws that change when noise of standard deviation 1e-6 is added to
the logits, the size of the difference between two batch shapes in float32.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from proximo.rollout.sampling import SamplingOptions, sample

LOGIT_NOISE = 1e-6
OPTIONS = SamplingOptions(max_new_tokens=1)
NO_IDS = torch.empty(0, dtype=torch.long)


def exponential_race(logits: Tensor, streams: Tensor, positions: Tensor) -> Tensor:
    """Proximo's own rule."""
    return sample(logits, streams=streams, positions=positions, options=OPTIONS, ending_ids=NO_IDS)[0]


def inverse_cdf(logits: Tensor, _streams: Tensor, _positions: Tensor) -> Tensor:
    """The alternative: one uniform number per row, cumulative sum in float64, in blocks of rows as the race."""
    uniforms = torch.rand(logits.shape[0], 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = max(1, 2**18 // logits.shape[1])
    tokens = []
    for block, uniform in zip(logits.split(rows), uniforms.split(rows), strict=True):
        weights = (block - block.amax(dim=1, keepdim=True)).exp_()
        weights.sum(dim=1).log_()  # for the log-prob, as the race has it
        sums = weights.cumsum(dim=1, dtype=torch.float64)
        tokens.append(torch.searchsorted(sums, uniform * sums[:, -1:], right=True)[:, 0])
    return torch.cat(tokens)


def multinomial(logits: Tensor, _streams: Tensor, _positions: Tensor) -> Tensor:
    """What most samplers call; it draws from a generator's state."""
    return torch.multinomial(logits.log_softmax(dim=1).exp_(), 1)[:, 0]


Rule = Callable[[Tensor, Tensor, Tensor], Tensor]
RULES: dict[str, Rule] = {"race": exponential_race, "inverse CDF": inverse_cdf, "multinomial": multinomial}


def rows_of(num_rows: int, vocabulary: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of standard deviation 3, streams and positions."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(num_rows, vocabulary, generator=generator)
    streams = torch.randint(-(2**62), 2**62, (num_rows,), generator=generator)
    return logits, streams, torch.arange(num_rows)


def microseconds_per_row(rule: Rule, num_rows: int, vocabulary: int, repeats: int) -> float:
    """The best of five rounds, in CPU time."""
    rows = rows_of(num_rows, vocabulary, seed=0)
    rule(*rows)
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        for _ in range(repeats):
            rule(*rows)
        best = min(best, time.process_time() - start)
    return 1e6 * best / repeats / num_rows


def count_flips(rule: Rule, vocabulary: int, num_draws: int) -> int:
    """Draws that change under noise of `LOGIT_NOISE`; random numbers stay."""
    flips = 0
    for seed in range(num_draws // 64):
        logits, streams, positions = rows_of(64, vocabulary, seed)
        noise = LOGIT_NOISE * torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed + 10**6))
        changed = rule(logits, streams, positions) != rule(logits + noise, streams, positions)
        flips += int(changed.sum())
    return flips


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=6400, help="draws per vocabulary at 152k tokens; 20 times at 2k")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'rule':>12} {'vocabulary':>10} {'us/row, 1 row':>14} {'us/row, 64 rows':>16} {'flips':>12} {'rate':>8}")
    for vocabulary, scale in ((2048, 20), (151_936, 1)):
        for name, rule in RULES.items():
            times = [microseconds_per_row(rule, rows, vocabulary, repeats=2 * scale) for rows in (1, 64)]
            draws = arguments.draws * scale
            flips = None if rule is multinomial else count_flips(rule, vocabulary, draws)
            shown = f"{'-':>12} {'-':>8}" if flips is None else f"{f'{flips}/{draws}':>12} {flips / draws:8.1e}"
            print(f"{name:>12} {vocabulary:>10} {times[0]:14.0f} {times[1]:16.0f} {shown}", flush=True)


if __name__ == "__main__":
    main()
