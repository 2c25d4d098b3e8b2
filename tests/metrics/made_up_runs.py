"""Run folders with made-up curves, for the tests of the report. Not results of anything."""

import json
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Curve = Callable[[float], float]
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


def write_curves(
    folder: Path, num_steps: int, training: Mapping[str, Curve], evaluation: Mapping[str, Curve], *, every: int
) -> Path:
    """Metrics that are functions of the part of the run that is over."""
    folder.mkdir(parents=True)
    lines = []
    for step in range(num_steps + 1):
        curves = {**(training if step else {}), **(evaluation if step % every == 0 else {})}
        lines.append({"step": step} | {name: curve(step / num_steps) for name, curve in curves.items()})
    write_lines(folder / "metrics.jsonl", lines)
    return folder


def rising(start: float, end: float, noise: float = 0.0) -> Curve:
    """From one value nearly to another, most of it early."""
    rng = random.Random(3)
    return lambda part: start + (end - start) * (1 - math.exp(-4 * part)) + rng.gauss(0, noise)


def write_sft_run(folder: Path, *, num_steps: int = 300) -> Path:
    training = {
        "sft/loss": rising(4.3, 1.1, 0.08),
        "sft/perplexity": rising(70, 3),
        "sft/gradient_norm": rising(2.4, 0.4, 0.05),
        "sft/learning_rate": lambda part: 1e-3 * (1 - part),
        "throughput/train_tokens_per_second": rising(15200, 15200, 300),
        "time/step_seconds": rising(0.22, 0.22, 0.01),
    }
    held_out = {"evaluation/loss": rising(4.4, 1.15), "evaluation/bits_per_character": rising(2.0, 0.53)}
    write_curves(folder, num_steps, training, held_out, every=50)
    (folder / "config.resolved.json").write_text(json.dumps({"trainer": "sft", "epochs": 3}))
    return folder


def write_dpo_run(folder: Path, *, num_steps: int = 60, last_logprob: float = -46.0) -> Path:
    """The log-prob of the chosen answers goes from -42 to `last_logprob`."""
    training = {
        "dpo/loss": rising(0.693, 0.393, 0.02),
        "dpo/accuracy": rising(0.5, 0.78, 0.03),
        "dpo/margin": rising(0, 1.1),
        "dpo/logprob_chosen": rising(-40, -43, 2),
        "dpo/logprob_rejected": rising(-44, -58, 2),
    }
    held_out = {
        "evaluation/pair_accuracy": rising(0.5, 0.75),
        "evaluation/loss": rising(0.693, 0.443),
        "evaluation/logprob_chosen": lambda part: -42 + part * (last_logprob + 42),
    }
    return write_curves(folder, num_steps, training, held_out, every=20)


def write_reward_run(folder: Path, *, num_steps: int = 120) -> Path:
    training = {
        "reward_model/loss": rising(0.693, 0.393, 0.03),
        "reward_model/pair_accuracy": rising(0.5, 0.83, 0.04),
        "reward_model/margin_mean": rising(0, 1.7),
    }
    held_out = {
        "evaluation/pair_accuracy": rising(0.5, 0.81),
        "evaluation/loss": rising(0.693, 0.423),
        "evaluation/calibration_error": rising(0.09, 0.04),
    }
    write_curves(folder, num_steps, training, held_out, every=20)
    rng = random.Random(5)
    margins = [rng.gauss(1.4, 1.3) for _ in range(60)]
    texts = {"prompt": "Write about an item:", "chosen": WORDS[0], "rejected": WORDS[1]}
    pairs = [
        {"step": num_steps, "kind": "pair", **texts, "score_chosen": margin / 2, "score_rejected": -margin / 2}
        for margin in margins
    ]
    write_lines(folder / "samples.jsonl", pairs)
    return folder
