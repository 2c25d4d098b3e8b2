"""Run folders with made-up curves, for the tests of the report. Not results of anything."""

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HOSTILE = '<script>alert("x")</script> & <b>bold</b> [red]markup[/red] {{ 7 * 7 }} </style>'
WORDS = ("the soup was warm and good", "a dull film with a fine end", "I would buy this lamp again", "cold and late")


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def ppo_line(step: int, num_steps: int, rng: random.Random) -> dict[str, float]:
    part = step / num_steps
    rise = 1 - math.exp(-4 * part)
    noise = rng.gauss
    line = {
        "step": step,
        "score/mean": -0.4 + 2.2 * rise + noise(0, 0.12),
        "score/std": 0.8 - 0.3 * rise,
        "score/warmth/mean": -0.2 + 1.2 * rise + noise(0, 0.06),
        "score/form/mean": -0.2 + 1.0 * rise + noise(0, 0.06),
        "gold/mean": 0.45 + 0.4 * rise + noise(0, 0.03),
        "reward/mean": -0.4 + 1.8 * rise + noise(0, 0.12),
        "kl/sequence": 9 * rise + noise(0, 0.3),
        "kl/per_token": 0.25 * rise,
        "kl/k3_per_token": 0.24 * rise,
        "kl/coefficient": 0.05,
        "advantage/mean": noise(0, 0.05),
        "advantage/std": 0.7 - 0.4 * part,
        "value/explained_variance": -4 + 4.8 * (1 - math.exp(-15 * part)) + noise(0, 0.04),
        "response/tokens_mean": 31 + 6 * rise + noise(0, 0.8),
        "response/tokens_max": 64,
        "response/finished_fraction": min(1.0, 0.85 + 0.13 * rise + noise(0, 0.01)),
        "response/distinct_2": 0.42 - 0.08 * rise + noise(0, 0.005),
        "response/unscored": 0,
        "first_minibatch/max_abs_log_ratio": 4e-6 + abs(noise(0, 1e-6)),
        "policy/loss": noise(0, 0.01),
        "policy/clip_fraction": 0.09 - 0.04 * part + abs(noise(0, 0.01)),
        "policy/approx_kl": 0.006 + abs(noise(0, 0.001)),
        "policy/entropy": 1.9 - 0.7 * rise + noise(0, 0.03),
        "policy/gradient_norm": 0.7 + abs(noise(0, 0.1)),
        "policy/learning_rate": 1e-4 * (1 - part),
        "policy/skipped_updates": 0,
        "value/loss": 0.4 * math.exp(-4 * part) + 0.1 + abs(noise(0, 0.02)),
        "value/clip_fraction": 0.12 - 0.08 * part + abs(noise(0, 0.01)),
        "value/gradient_norm": 1.4 + abs(noise(0, 0.2)),
        "progress/step": step,
        "time/rollout_seconds": 0.9 + 0.2 * rise + abs(noise(0, 0.03)),
        "time/score_seconds": 0.11,
        "time/reference_seconds": 0.13,
        "time/values_seconds": 0.12,
        "time/experience_seconds": 0.01,
        "time/train_value_seconds": 0.6 + abs(noise(0, 0.02)),
        "time/train_policy_seconds": 0.75 + abs(noise(0, 0.02)),
        "throughput/rollout_tokens_per_second": 4200 - 500 * rise + noise(0, 90),
        "throughput/train_tokens_per_second": 11800 + noise(0, 200),
        "memory/peak_mib": 690 + min(step, 5),
    }
    if step % max(1, num_steps // 8) == 0:
        line |= {
            "evaluation/score": -0.4 + 2.25 * rise,
            "evaluation/gold": 0.44 + 0.42 * rise,
            "evaluation/kl": 9.2 * rise,
            "evaluation/tokens": 31 + 6.5 * rise,
            "evaluation/finished_fraction": 0.86 + 0.13 * rise,
            "evaluation/distinct_2": 0.43 - 0.09 * rise,
        }
    return line


def sample(step: int, index: int, kind: str = "evaluation", **changes: Any) -> dict[str, Any]:
    late = step > 0
    record = {
        "step": step,
        "kind": kind,
        "prompt_id": f"p{index}",
        "prompt": f"Write about item {index}:",
        "response": f"{WORDS[index % 4]}{', and I mean it' if late else ''}.",
        "score": 1.62 + 0.05 * index if late else -0.3 - 0.1 * index,
        "components": {"warmth": 0.9 if late else -0.2, "form": 0.7 if late else -0.1},
        "gold": 0.85 if late else 0.41,
        "kl": 8.1 if late else 0.0,
        "num_tokens": 34 + index % 7,
        "finish": "length" if index == 2 and not late else "eos",
    }
    return record | changes


def write_ppo_run(folder: Path, *, num_steps: int = 60, hostile: bool = False) -> Path:
    folder.mkdir(parents=True)
    rng = random.Random(7)
    start = {name: value for name, value in ppo_line(0, num_steps, rng).items() if name.startswith(("step", "eval"))}
    write_lines(
        folder / "metrics.jsonl", [start] + [ppo_line(step, num_steps, rng) for step in range(1, num_steps + 1)]
    )
    text: Mapping[str, Any] = {"prompt": HOSTILE, "response": HOSTILE} if hostile else {}
    samples = [sample(0, index, **text) for index in range(10)]
    samples += [
        sample(step, index, "train", score=rng.gauss(1, 0.5)) for step in range(1, num_steps + 1) for index in range(4)
    ]
    samples += [sample(num_steps, index, **text) for index in range(10)]
    write_lines(folder / "samples.jsonl", samples)
    config = {"trainer": "ppo", "seed": 1, "model": {"path": "runs/demo/sft"}, "kl": {"coefficient": 0.05}}
    (folder / "config.resolved.json").write_text(json.dumps(config | ({"note": HOSTILE} if hostile else {})))
    (folder / "environment.json").write_text(json.dumps({"python": "3.11.2", "torch": "2.13.0", "threads": 2}))
    return folder


def write_sft_run(folder: Path, *, num_steps: int = 300) -> Path:
    folder.mkdir(parents=True)
    rng = random.Random(3)
    lines = []
    for step in range(num_steps + 1):
        loss = 1.1 + 3.2 * math.exp(-step / 40)
        line: dict[str, float] = {"step": step}
        if step:
            line |= {
                "sft/loss": loss + rng.gauss(0, 0.08),
                "sft/perplexity": math.exp(loss),
                "sft/gradient_norm": 0.4 + 2 * math.exp(-step / 20) + abs(rng.gauss(0, 0.05)),
                "sft/learning_rate": 1e-3 * (1 - step / num_steps),
                "throughput/train_tokens_per_second": 15200 + rng.gauss(0, 300),
                "time/step_seconds": 0.21 + abs(rng.gauss(0, 0.01)),
            }
        if step % 50 == 0:
            line |= {"evaluation/loss": loss + 0.05, "evaluation/bits_per_character": (loss + 0.05) * 0.46}
        lines.append(line)
    write_lines(folder / "metrics.jsonl", lines)
    (folder / "config.resolved.json").write_text(json.dumps({"trainer": "sft", "epochs": 3}))
    return folder


def write_dpo_run(folder: Path, *, num_steps: int = 60, last_logprob: float = -46.0) -> Path:
    """The log-prob of the chosen answers goes from -42 to `last_logprob`."""
    folder.mkdir(parents=True)
    rng = random.Random(6)
    lines = []
    for step in range(num_steps + 1):
        learned = 1 - math.exp(-step / 15)
        line: dict[str, float] = {"step": step}
        if step:
            line |= {
                "dpo/loss": 0.693 - 0.3 * learned + rng.gauss(0, 0.02),
                "dpo/accuracy": min(1.0, 0.5 + 0.28 * learned + rng.gauss(0, 0.03)),
                "dpo/margin": 1.1 * learned,
                "dpo/reward_chosen": -0.3 * learned,
                "dpo/reward_rejected": -1.4 * learned,
                "dpo/logprob_chosen": -40 - 3 * learned + rng.gauss(0, 2),
                "dpo/logprob_rejected": -44 - 14 * learned + rng.gauss(0, 2),
            }
        if step % 20 == 0:
            part = step / num_steps
            line |= {
                "evaluation/pair_accuracy": 0.5 + 0.25 * learned,
                "evaluation/loss": 0.693 - 0.25 * learned,
                "evaluation/logprob_chosen": -42 + part * (last_logprob + 42),
                "evaluation/logprob_rejected": -45 - 13 * part,
            }
        lines.append(line)
    write_lines(folder / "metrics.jsonl", lines)
    return folder


def write_reward_run(folder: Path, *, num_steps: int = 120) -> Path:
    folder.mkdir(parents=True)
    rng = random.Random(5)
    lines = []
    for step in range(num_steps + 1):
        learned = 1 - math.exp(-step / 30)
        line: dict[str, float] = {"step": step}
        if step:
            line |= {
                "reward_model/loss": 0.693 - 0.3 * learned + rng.gauss(0, 0.03),
                "reward_model/pair_accuracy": min(1.0, 0.5 + 0.33 * learned + rng.gauss(0, 0.04)),
                "reward_model/score_chosen_mean": 0.9 * learned,
                "reward_model/score_rejected_mean": -0.8 * learned,
                "reward_model/margin_mean": 1.7 * learned,
            }
        if step % 20 == 0:
            line |= {
                "evaluation/pair_accuracy": 0.5 + 0.31 * learned,
                "evaluation/loss": 0.693 - 0.27 * learned,
                "evaluation/calibration_error": 0.09 - 0.05 * learned,
            }
        lines.append(line)
    write_lines(folder / "metrics.jsonl", lines)
    margins = [rng.gauss(1.4, 1.3) for _ in range(600)]
    pairs = [
        {
            "step": num_steps,
            "kind": "pair",
            "prompt": f"Write about item {index}:",
            "chosen": WORDS[index % 4],
            "rejected": WORDS[(index + 1) % 4],
            "score_chosen": margin / 2,
            "score_rejected": -margin / 2,
        }
        for index, margin in enumerate(margins)
    ]
    write_lines(folder / "samples.jsonl", pairs)
    return folder
