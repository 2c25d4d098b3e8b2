"""How often answers of policies beat those of the first one, by a judge: `wins.py JUDGE REWARD BASE OTHER ...`

All are runs or folders of models. Each policy answers the held-out prompts of `data/preferences`, four times each, and
every answer meets every answer of the base to the same prompt; a tie counts half. The intervals (95%) are bootstraps
over prompts. Beside the judge stands REWARD, the model that the policies may have learned from, and best of four by it,
of four further answers of the base.
Results with ten samples, by position, and the loss on stories go to `runs/wins.json`.
"""

import json
import random
import sys
from pathlib import Path
from statistics import mean

from sentiment import Row, rows_of, story_loss

from proximo.commands.generate import GenerateOptions, generate
from proximo.models.precision.placement import Precision, resolve_device
from proximo.models.pretrained.vocabulary import load_tokenizer
from proximo.rollout.sampling import SamplingOptions
from proximo.run.checkpoint_lookup import language_model_path, reward_model_path
from proximo.run.make.models import DeviceSpec, build_reward_source, reward_model_config

DATA = Path("data")
SAMPLES, TOKENS = 4, 48
RESAMPLES = 2000
SHOWN = 10
HIDDEN = {"samples", "curve", "evaluations"}
STORIES = 10
Groups = list[list[float]]
"""By prompt, the scores of its answers."""


def main(judge: str, reward: str, *policies: str) -> None:
    """Print a line for each policy, and write all."""
    prompts = [row["prompt"] for row in rows_of(DATA / "preferences/prompts_held_out.jsonl")]
    stories = rows_of(DATA / "lm_corpus/stories.jsonl")[:STORIES]
    sampling = SamplingOptions(max_new_tokens=TOKENS)
    base: dict[str, Groups] = {}
    found: list[Row] = []
    for policy in policies:
        path = language_model_path(policy)
        number = SAMPLES if base else 2 * SAMPLES
        answers = generate(policy, prompts, GenerateOptions(sampling=sampling, num_samples=number, chat=True))
        spec = DeviceSpec(device=resolve_device("cpu"), precision=Precision.FLOAT32, seed=0)
        groups: dict[str, Groups] = {}
        for name, model in (("judge", judge), ("reward", reward)):
            config = reward_model_config(reward_model_path(model))
            source = build_reward_source(config, load_tokenizer(path), device_spec=spec, tokens_per_microbatch=8192)
            scores = [each.score for each in source.score(answers)]
            groups[name] = [scores[start : start + number] for start in range(0, len(scores), number)]
        described = {
            "tokens": round(mean(len(answer.token_ids) for answer in answers), 1),
            "ended": round(mean(len(answer.token_ids) < TOKENS for answer in answers), 3),
            "story_loss": story_loss(path, stories),
            **training(Path(policy)),
        }
        shown = [{"prompt": prompts[n], "answer": answers[n * number].text} for n in range(SHOWN)]
        if not base:
            further = {name: [row[SAMPLES:] for row in rows] for name, rows in groups.items()}
            base = groups = {name: [row[:SAMPLES] for row in rows] for name, rows in groups.items()}
            best = {name: best_by(further["reward"], rows) for name, rows in further.items()}
            found.append({"policy": f"{policy}, best of {SAMPLES}", **compared(base, best)})
        found.append({"policy": policy, **compared(base, groups), **described, "samples": shown})
        print(json.dumps({key: value for key, value in found[-1].items() if key not in HIDDEN}), flush=True)
    print(json.dumps(found[0]))
    Path("runs/wins.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def training(run: Path) -> Row:
    """Seconds and memory of a run, the start and end of its evaluations, and the curve of one that samples."""
    if not (run / "metrics.jsonl").exists():
        return {}
    metrics = rows_of(run / "metrics.jsonl")
    steps = [row for row in metrics if "time/step_seconds" in row]
    ends = [{key: value for key, value in row.items() if key.startswith("evaluation/")} for row in metrics]
    ends = [end for end in ends if end]
    named = {"step": "step", "score": "score/mean", "kl": "kl/sequence", "tokens": "response/tokens_mean"}
    return {
        "seconds": round(sum(row["time/step_seconds"] for row in steps)),
        "peak_mib": round(max(row.get("memory/peak_mib", 0) for row in steps)),
        "evaluations": [ends[0], ends[-1]] if ends else [],
        "curve": [{key: row[name] for key, name in named.items()} for row in steps if "score/mean" in row],
    }


def best_by(reward: Groups, scores: Groups) -> Groups:
    """Of each prompt, the score of the answer that the reward model likes best."""
    return [[row[mine.index(max(mine))]] for mine, row in zip(reward, scores, strict=True)]


def compared(base: dict[str, Groups], groups: dict[str, Groups]) -> Row:
    """By each model: the share of meetings won, its interval, and the mean score."""
    row: Row = {}
    for name, scores in groups.items():
        shares = [
            mean((mine > theirs) + 0.5 * (mine == theirs) for mine in ours for theirs in others)
            for ours, others in zip(scores, base[name], strict=True)
        ]
        rng = random.Random(0)
        drawn = sorted(mean(rng.choices(shares, k=len(shares))) for _ in range(RESAMPLES))
        row[f"wins by {name}"] = round(mean(shares), 3)
        row[f"interval by {name}"] = [round(drawn[RESAMPLES // 40], 3), round(drawn[-RESAMPLES // 40], 3)]
        row[f"score of {name}"] = round(mean(score for group in scores for score in group), 3)
    return row


if __name__ == "__main__":
    main(*sys.argv[1:])
