"""PPO with an engine that samples from another distribution than the learner's, with and without corrections.

    python benchmarks/corrections.py --seeds 3 --processes 2

Two tasks on a model of two layers, and what docs/rollout.md derives for them:

`dislikes`: half of the prompts score 1 and half 0, whatever is written, and each z of four tokens costs a tenth. The
engine's logit of z is too high. The best policy never writes z.

`fragile`: a response that begins with s scores 0.75. Any other scores 1 if it is the five letters after the prompt's,
and else 0. At 15 of 100 tokens the engine draws any letter. The policy starts with half of its responses from either
kind; the best one never writes s.

Held-out scores are those of the learner's own distribution, sampled in float32. Prints the tables of
benchmarks/README.md and keeps the curves in benchmarks/results/corrections.csv.
"""

import argparse
import csv
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

import torch
from perturbed_engines import ShiftedEngine, bf16_engine, prefers, slips
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from proximo.config.ppo.options import PPOConfig
from proximo.models.language import LanguageModel
from proximo.ppo.roles.policy import sampling_options
from proximo.ppo.trainer import PPOTrainer
from proximo.rollout.engine import Engine
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey

RESULTS = Path(__file__).parent / "results" / "corrections.csv"
PROMPTS = "abcdef"
LETTERS = f"{PROMPTS}gsz"
END = len(LETTERS)
GOOD = "abc"
"""Prompts of `dislikes` whose responses score 1."""
COST = 0.1
"""Of each z there, of `LENGTHS` tokens."""
SAFE = 0.75
LENGTHS = {"dislikes": 4, "fragile": 5}
PREFERENCE, SLIPS = 2.0, 0.15
WATCHED = ("mismatch/k3", "mismatch/max_abs_log_ratio", "policy/behaviour_weight", "policy/behaviour_clip_fraction")
RESPONSES = {"of": "response", "cap": 4.0}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "token, truncated": {"behaviour_weight": "truncated"},
    "token, masked": {"behaviour_weight": {"kind": "masked", "floor": 0.5}},
    "response, truncated": {"behaviour_weight": {"kind": "truncated", **RESPONSES}},
    "response, masked": {"behaviour_weight": {"kind": "masked", "floor": 0.25, **RESPONSES}},
    "rejection of responses": {"rejection": {"kind": "divergence", "over": "max", "limit": 1.5}},
    "rejection, and token, truncated": {
        "rejection": {"kind": "divergence", "over": "max", "limit": 2.5},
        "behaviour_weight": "truncated",
    },
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One curve for each seed."""

    task: str
    engine: str
    """`own` (the built-in one), `bf16`, or `shifted`."""
    advantage: str
    correction: str = "none"
    by: float = PREFERENCE
    """Shift of the logit of z."""


NAMES = tuple(each.name for each in fields(Case))
ADVANTAGES = ("return_to_go", "group_standardised", "gae")
CASES = (
    *(Case(task="dislikes", engine="own", advantage=each) for each in ADVANTAGES),
    *(Case(task="dislikes", engine="shifted", advantage=a, correction=c) for a, c in product(ADVANTAGES, CORRECTIONS)),
    *(Case(task="dislikes", engine="shifted", advantage="return_to_go", by=by) for by in (0.1, 0.2, 0.3, 0.5, 1.0)),
    *(Case(task="fragile", engine="own", advantage=each) for each in ("group_standardised", "gae")),
    *(
        Case(task="fragile", engine="shifted", advantage=a, correction=c)
        for a, c in product(("group_standardised", "gae"), CORRECTIONS)
    ),
    *(
        Case(task=task, engine="bf16", advantage=advantage, correction=correction)
        for (task, advantage), correction in product(
            (("dislikes", "return_to_go"), ("fragile", "gae")), ("none", "token, truncated")
        )
    ),
)


def main() -> None:
    """Run every case and seed; print the tables and keep the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds")
    parser.add_argument("--steps", type=int, default=100, help="steps of each run")
    parser.add_argument("--processes", type=int, default=1, help="runs at once, one thread each")
    options = parser.parse_args()
    jobs = list(product(CASES, range(options.seeds)))
    with ProcessPoolExecutor(options.processes) as pool:
        found = pool.map(curve, *zip(*jobs, strict=True), [options.steps] * len(jobs))
        rows = []
        for (case, seed), points in zip(jobs, found, strict=True):
            rows += [{**vars(case), "seed": seed, **point} for point in points]
            print(f"# {case} {seed}: {points[-1]}", flush=True)
    keep(rows)
    print_table(rows)


def score(task: str, prompt: str, text: str) -> float:
    """The task's reward."""
    written = text.split()
    if task == "dislikes":
        return float(prompt in GOOD) - COST * written.count("z")
    return SAFE if written[:1] == ["s"] else float(written == following(prompt))


def following(prompt: str) -> list[str]:
    """The letters after the prompt's, round and round."""
    return [PROMPTS[(PROMPTS.index(prompt) + 1 + n) % len(PROMPTS)] for n in range(LENGTHS["fragile"])]


def curve(case: Case, seed: int, num_steps: int = 100, every: int = 5) -> list[dict[str, float]]:
    """Held-out score, share of the bad token, and mismatch, every few steps."""
    torch.set_num_threads(1)
    made = trainer(case, seed)
    prompts = list(PROMPTS) * (made.config.prompts_per_step // len(PROMPTS))
    points = [held_out(case, made)]
    for step in range(1, num_steps + 1):
        responses = made.generate(prompts)
        line = made.step(prompts, responses, [score(case.task, each.prompt.text, each.text) for each in responses])
        if step % every == 0:
            points.append({"step": step, **held_out(case, made), **watched(line)})
    return [{"step": 0, **points[0], **watched({})}, *points[1:]]


def watched(line: Mapping[str, float]) -> dict[str, float | str]:
    """Metrics of the mismatch with four digits; empty where the step has none."""
    return {name: f"{line[name]:.4g}" if name in line else "" for name in (*WATCHED, "policy/rejected_fraction")}


def trainer(case: Case, seed: int) -> PPOTrainer:
    """From random weights for `dislikes`; from a policy that knows both ways for `fragile`."""
    core = Tokenizer(models.WordLevel(vocab={letter: n for n, letter in enumerate([*LETTERS, "<eos>"])}, unk_token="a"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=END + 1, max_position_embeddings=16, eos_token_id=END, **shape))
    if case.task == "fragile":
        know_both_ways(model)
    group = 1 if case.advantage in ("gae", "return_to_go") else 8
    optimizer = {"learning_rate": 5e-4 if case.task == "fragile" else 1e-3}
    config = PPOConfig(
        num_steps=10_000,
        prompts_per_step=192 // group,
        responses_per_prompt=group,
        epochs_per_step=1,
        kl="none",
        rollout={"max_new_tokens": LENGTHS[case.task], "max_num_seqs": 192},
        advantage={"estimator": case.advantage} | ({"gae_lambda": 1.0} if case.advantage == "gae" else {}),
        policy_optimizer=optimizer,
        value_optimizer=optimizer,
        policy_loss=CORRECTIONS[case.correction],
        guards={"max_mismatch": None},  # the engines differ on purpose
    )
    return PPOTrainer(model, tokenizer, config=config, seed=seed, engine=engine(case, model, tokenizer))


def engine(case: Case, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Engine:
    """The engine of a case."""
    if case.engine == "own":
        return LocalEngine(LanguageModel(model), tokenizer, eos_token_ids=[END])
    if case.engine == "bf16":
        return bf16_engine(model, tokenizer, eos_token_ids=[END])
    shift = prefers(LETTERS.index("z"), case.by) if case.task == "dislikes" else slips(SLIPS)
    return ShiftedEngine(model, tokenizer, shift, eos_token_ids=[END])


def know_both_ways(model: LlamaForCausalLM, num_updates: int = 200) -> None:
    """Fine-tune until half of the responses to each prompt are the letters that follow, and half s."""
    rows = []
    for prompt in PROMPTS:
        right = [LETTERS.index(letter) for letter in following(prompt)]
        rows += [[LETTERS.index(prompt), *right], [LETTERS.index(prompt), LETTERS.index("s"), END, -100, -100, -100]]
    ids = torch.tensor(rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(num_updates):
        logits = model(input_ids=ids.clamp(min=0)).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=-100).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def held_out(case: Case, made: PPOTrainer) -> dict[str, float]:
    """Mean score of 300 samples of the learner's own distribution, and the share of z (s) where it is bad."""
    own = LocalEngine(made.policy, made.tokenizer, eos_token_ids=[END])
    responses = own.generate(
        made._prompts(list(PROMPTS) * 50),
        num_samples=1,
        options=sampling_options(made.config),
        key=RandomKey(seed=99, purpose="evaluation"),
    )
    pairs = [(each.prompt.text, each.text.split()) for each in responses]
    if case.task == "dislikes":
        bad = [words.count("z") / LENGTHS["dislikes"] for prompt, words in pairs if prompt in GOOD]
    else:
        bad = [float(words[:1] == ["s"]) for _, words in pairs]
    scores = [score(case.task, each.prompt.text, each.text) for each in responses]
    return {"score": round(statistics.mean(scores), 4), "bad": round(statistics.mean(bad), 4)}


def keep(rows: Sequence[Mapping[str, Any]]) -> None:
    """A line for each case, seed and measure, with its values by step."""
    steps = sorted({row["step"] for row in rows})
    lines: dict[tuple[Any, ...], dict[int, Any]] = {}
    for row, measure in product(rows, ("score", "bad", "mismatch/k3")):
        name = (*(row[key] for key in (*NAMES, "seed")), measure)
        lines.setdefault(name, {})[row["step"]] = row[measure]
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*NAMES, "seed", "measure", *steps])
        writer.writerows([*name, *(values[step] for step in steps)] for name, values in lines.items())


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """The end of every case: a row each, the seeds side by side."""
    last = max(row["step"] for row in rows)
    print("| task | engine | advantage | correction | shift | score, by seed | share of z or s | mismatch/k3 at 5 |")
    print("|---|---|---|---|---|---|---|---|")
    for case in CASES:
        own = [row for row in rows if all(row[key] == value for key, value in vars(case).items())]
        ends = [row for row in own if row["step"] == last]
        early = [row["mismatch/k3"] for row in own if row["step"] == 5]
        scores = ", ".join(f"{row['score']:.2f}" for row in ends)
        shares = ", ".join(f"{row['bad']:.2f}" for row in ends)
        cells = [*vars(case).values(), scores, shares, early[0]]
        print("|", " | ".join(map(str, cells)), "|")


if __name__ == "__main__":
    main()
