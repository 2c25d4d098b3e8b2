"""PPO with a slow engine and bounds on staleness: time, score and age of the samples, beside what a model predicts.

    python benchmarks/asynchronous.py --seeds 3 --processes 2

The task is to count down: after the prompt 17 the right response is 16 15 ... 0, and its score is the share of the
numbers before the first mistake. The policy begins with a mistake in every fourth token. Prompts have a long tail:
the median is 4, and the longest of a batch is 20 to 60.

A pass of the engine is as long for one response as for all, so a batch takes as long as its longest response: G. What
remains of a step takes T. Two engines: `one batch at a time` queues calls, as the built-in engine does, and `several
batches at once` decodes all calls together, as vLLM does. Time is simulated (simulated_clock.py), with T = 1, so that
the figures do not depend on the machine.

Prediction, with X_t the time at which step t asks for its responses and D_t when they are there: X_{t+1} =
max(X_t, D_t) + T, and D_{t+k} = X_t + G for several batches at once, max(X_t, D_{t+k-1}) + G for one at a time, and
for a bound of 1, which begins a batch when the one before is complete. With a constant G the step takes
max(T, (G + T) / (k + 1)), and in the second case max(T, G, (G + T) / (k + 1)).

Prints the tables of benchmarks/README.md and keeps all numbers in benchmarks/results/asynchronous.csv.
"""

import argparse
import copy
import csv
import functools
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from itertools import chain, pairwise, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from simulated_clock import SimulatedEngine
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from proximo.algorithms.masking import segment_sum
from proximo.config.ppo.options import PPOConfig
from proximo.models.language import LanguageModel
from proximo.ppo.calls import OwnCall
from proximo.ppo.roles.policy import sampling_options
from proximo.ppo.step_metrics import StepOutcome
from proximo.ppo.trainer import PPOTrainer
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey

RESULTS = Path(__file__).parent / "results" / "asynchronous.csv"
LARGEST = 60
END = LARGEST + 1
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
MISTAKES = 0.25
MEAN_PASSES = 38
"""Of a batch: the mean of its longest response."""
LEARNING_RATE = 1e-3
PROMPTS_PER_STEP = 64
BOUNDS = (0, 1, 2, 4, 8)
ENGINES = ("one batch at a time", "several batches at once")
STALENESS = (
    "mean_steps",
    "effective_fraction",
    "interrupted_fraction",
    "learner_idle_fraction",
    "engine_idle_fraction",
)
GOAL = 0.85


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run for each seed."""

    slowness: float
    """How many times as long as training a batch takes."""
    engine: str
    bound: int
    weight: str = "truncated"
    """The behaviour weight; a synchronous run has none."""


CASES = (
    *(Case(slowness=slowness, engine=ENGINES[0], bound=0, weight="none") for slowness in (1, 3)),
    *(Case(slowness=s, engine=engine, bound=bound) for s, engine, bound in product((1, 3), ENGINES, BOUNDS[1:])),
    *(Case(slowness=slowness, engine=ENGINES[1], bound=8, weight="none") for slowness in (1, 3)),
)


def main() -> None:
    """Measure what training takes, then run every case and seed, and print and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds")
    parser.add_argument("--steps", type=int, default=40, help="steps of each run")
    parser.add_argument("--processes", type=int, default=1, help="runs at once, one thread each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    jobs = [(case, seed, options.steps) for seed, case in product(range(options.seeds), CASES)]
    for seed in range(options.seeds):
        first_model(seed)  # once for all processes
    rows = []
    with ProcessPoolExecutor(options.processes, mp_context=get_context("fork")) as pool:
        for row in pool.map(simulated, *zip(*jobs, strict=True)):
            rows.append(row)
            print("#", row, flush=True)
    keep(rows)
    print_table(rows)


def simulated(case: Case, seed: int, num_steps: int) -> dict[str, Any]:
    """One run by the simulated clock."""
    model = LanguageModel(LlamaForCausalLM(shape()))
    engine = SimulatedEngine(model, tokenizer(), eos_token_ids=[END], max_num_seqs=PROMPTS_PER_STEP, owns_model=True)
    engine.prepare(case.slowness / MEAN_PASSES, 1.0, several_calls=case.engine == ENGINES[1])
    return run(case, seed, engine, num_steps=num_steps)


def run(case: Case, seed: int, engine: SimulatedEngine, *, num_steps: int) -> dict[str, Any]:
    """One run: its time, its scores, and what it learned from."""
    made = Watched(case, seed, engine, num_steps=num_steps)
    history = made.train(texts(seed), reward=share_right, on_step=lambda *_: made.note())
    admitted = [engine.lengths[step] for step in range(num_steps)]
    assert len(engine.lengths) == num_steps, "a batch was sampled that no step learned from"
    curve = [made.held_out(state) for _, state in made.snapshots]
    gaps = [later - sooner for sooner, later in zip([0.0, *made.ended], made.ended, strict=False)]
    longest = [engine.seconds[step] for step in range(num_steps)]
    predicted = predict(longest, made.training, case)
    return {
        **vars(case),
        "seed": seed,
        "time": made.ended[-1],
        "step": statistics.median(gaps[num_steps // 8 :]),
        "predicted": predicted,
        "one_by_one": sum(longest) + sum(made.training),
        "training": statistics.mean(made.training),
        "sampling": statistics.mean(longest),
        "score": statistics.mean(curve[-3:]),
        "by_samples": statistics.mean(curve[1:]),
        **{name: statistics.mean(line.get(f"staleness/{name}", 0.0) for line in history) for name in STALENESS},
        "equal": admitted == made.lengths and Counter(chain(*admitted)) == Counter(chain(*made.lengths)),
        "tokens": sum(map(sum, made.lengths)),
        "curve": " ".join(f"{at:.2f}:{score:.3f}" for (at, _), score in zip(made.snapshots, curve, strict=True)),
    }


def predict(sampling: Sequence[float], training: Sequence[float], case: Case) -> float:
    """Time of the run: the model of this file's docstring with the time that each batch and training took."""
    asked, done, bound = 0.0, list[float](), case.bound
    for step in range(len(sampling)):
        while len(done) <= min(step + bound, len(sampling) - 1):
            serial = done and (bound == 1 or case.engine == ENGINES[0])
            begin = max(asked, done[-1]) if serial else asked
            done.append(begin + sampling[len(done)])
        asked = max(asked, done[step]) + training[step]
    return asked


class Watched(PPOTrainer):
    """A trainer that notes the lengths it trains on, when its steps end, and its weights every few steps."""

    def __init__(self, case: Case, seed: int, engine: SimulatedEngine, *, num_steps: int) -> None:
        config = PPOConfig(
            num_steps=num_steps,
            prompts_per_step=PROMPTS_PER_STEP,
            epochs_per_step=1,
            kl="none",
            rollout={"max_new_tokens": LARGEST + 4, "max_num_seqs": PROMPTS_PER_STEP, "staleness": case.bound},
            policy_optimizer={"learning_rate": LEARNING_RATE},
            value_optimizer={"learning_rate": LEARNING_RATE},
            policy_loss={"behaviour_weight": None if case.weight == "none" else case.weight},
        )
        super().__init__(copy.deepcopy(first_model(seed)), tokenizer(), config=config, seed=seed, engine=engine)
        # Before the end of the step pushes weights.
        trained = OwnCall(at="next_state", does="measure", function=lambda *_: engine.has_trained())
        self.own_calls = (trained,)
        self.lengths: list[list[int]] = []
        self.training: list[float] = []
        """Time of each step in which it did not wait for responses."""
        self.ended: list[float] = []
        self._engine, self._waited = engine, 0.0
        self.snapshots = [(0.0, self._weights())]
        if self.roles.policy.ahead is not None:
            engine.attach(self.roles.policy.ahead)
        self._begin = engine.now()

    def run_step(self, **given: Any) -> StepOutcome:
        outcome = super().run_step(**given)
        experience = outcome.experience
        self.lengths.append(segment_sum(experience.mask.long(), experience.lengths).tolist())
        self._waited = self._engine.seconds[self.state.steps_done - 1]
        if outcome.ahead is not None:
            self._waited = outcome.ahead.rollouts.waited_seconds
        return outcome

    def note(self, every: int = 5) -> None:
        """At the end of a step."""
        now = self._engine.now() - self._begin
        self.training.append(now - (self.ended[-1] if self.ended else 0.0) - self._waited)
        self.ended.append(now)
        if self.state.steps_done % every == 0:
            self.snapshots.append((self.ended[-1], self._weights()))

    def held_out(self, state: Mapping[str, torch.Tensor]) -> float:
        """Mean score of 250 samples of these weights, not of those that sampled for a step."""
        self.policy.model.load_state_dict(dict(state))
        responses = LocalEngine(self.policy, self.tokenizer, eos_token_ids=[END], max_num_seqs=250).generate(
            self._prompts(texts(99)[:250]),
            num_samples=1,
            options=sampling_options(self.config),
            key=RandomKey(seed=99, purpose="evaluation"),
        )
        prompts = [each.prompt.text for each in responses]
        return statistics.mean(share_right(prompts, [each.text for each in responses], []))

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.policy.model.state_dict().items()}


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each number."""
    vocabulary = {str(number): number for number in range(LARGEST + 1)} | {"<eos>": END}
    core = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def texts(seed: int, num: int = 2000) -> list[str]:
    """Prompts: most of them are small numbers, a few large."""
    rng = random.Random(f"prompts/{seed}")
    return [str(min(LARGEST, int(3 * (1 - rng.random()) ** -0.6))) for _ in range(num)]


def share_right(prompts: Sequence[Any], responses: Sequence[str], metadata: Sequence[Any]) -> list[float]:
    """The share before the first mistake of the numbers down to 0 and the end, or of the response if it is longer."""
    del metadata
    scores = []
    for prompt, response in zip(prompts, responses, strict=True):
        right = [*range(int(prompt) - 1, -1, -1), None]
        written = [*map(int, response.split()), None]
        same = next((n for n, pair in enumerate(zip(right, written, strict=False)) if pair[0] != pair[1]), len(right))
        scores.append(same / max(len(right), len(written)))
    return scores


def shape() -> LlamaConfig:
    """The shape of the model, of its own for each model."""
    return LlamaConfig(vocab_size=END + 1, max_position_embeddings=160, eos_token_id=END, **SHAPE)


@functools.cache
def first_model(seed: int, num_updates: int = 300) -> LlamaForCausalLM:
    """A model that counts down, and skips one number or more in every fourth token."""
    torch.manual_seed(seed)
    rng, model = random.Random(f"mistakes/{seed}"), LlamaForCausalLM(shape())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(num_updates):
        rows = torch.full((32, LARGEST + 2), -100)
        for row in rows:
            written = [rng.randint(1, LARGEST)]
            while written[-1] != END:
                skipped = rng.randint(1, 3) if rng.random() < MISTAKES else 0
                following = written[-1] - 1 - skipped
                written.append(following if following >= 0 else END if written[-1] == 0 else 0)
            row[: len(written)] = torch.tensor(written)
        logits = model(input_ids=rows.clamp(min=0)).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), ignore_index=-100).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def keep(rows: Sequence[Mapping[str, Any]]) -> None:
    """A line for each run."""
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: f"{v:.4g}" if isinstance(v, float) else v for name, v in row.items()} for row in rows)


def points(row: Mapping[str, Any]) -> list[tuple[float, float]]:
    """The curve of a run: times and held-out scores."""
    return [(float(at), float(score)) for at, score in (pair.split(":") for pair in row["curve"].split())]


def until_goal(row: Mapping[str, Any]) -> float:
    """When the held-out score is `GOAL`, by the line between two of its points."""
    for (begin, low), (end, high) in pairwise(points(row)):
        if high >= GOAL:
            return begin + (end - begin) * max(0.0, GOAL - low) / (high - low)
    return float("inf")


def by_time(row: Mapping[str, Any], until: float) -> float:
    """Mean held-out score from the start to `until`; after the last step it stays."""
    curve = points(row)
    curve.append((max(until, curve[-1][0]), curve[-1][1]))
    area = 0.0
    for (begin, low), (end, high) in pairwise(curve):
        stop = min(end, until)
        if stop > begin:
            area += (stop - begin) * (low + (low + (high - low) * (stop - begin) / (end - begin))) / 2
    return area / until


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """The medians over the seeds, a row for each case."""
    own_columns = ("time", "predicted", "one_by_one", "step", "training", "sampling", "score", "by_samples", *STALENESS)
    names = [each.name for each in fields(Case)]
    print("|", " | ".join([*names, *own_columns, "until_goal", "by_time", "admitted = trained"]), "|")
    print("|" + "---|" * (len(names) + len(own_columns) + 3))
    for case in CASES:
        own = [row for row in rows if all(row[name] == getattr(case, name) for name in names)]
        synchronous = [row for row in rows if row["slowness"] == case.slowness and not row["bound"]]
        until = statistics.median(row["time"] for row in synchronous)
        cells = [[row[name] for row in own] for name in own_columns]
        cells += [list(map(until_goal, own)), [by_time(row, until) for row in own]]
        medians = [f"{statistics.median(values):.3g}" for values in cells]
        equal = f"{sum(row['equal'] for row in own)} of {len(own)}"
        print("|", " | ".join(map(str, [*vars(case).values(), *medians, equal])), "|")


if __name__ == "__main__":
    main()
