"""Peak memory that `proximo plan` predicts beside what a run then needs, each run in a process of its own.

    python benchmarks/plan.py                     all cases, three runs each; writes results/plan.json
    python benchmarks/plan.py --case ppo-lora --runs 1

Measured is the greatest resident memory of the process (VmHWM) above its level after the imports (VmRSS). Models are
random, of 30 to 60 million parameters; every sequence is as long as the recipe allows.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "plan.json"
MIB = 2**20
NUM_ROWS = 64
NEW_TOKENS = 32
WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
QWEN2 = {
    **LLAMA,
    "model_type": "qwen2",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
QWEN2_DEEP = {**QWEN2, "num_hidden_layers": 16, "vocab_size": 32000}
EXPERTS = {
    **QWEN2,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "vocab_size": 16000,
}
GPT2 = {"model_type": "gpt2", "n_embd": 512, "n_layer": 8, "n_head": 8, "n_positions": 2048, "vocab_size": 32000}
CRITIC_FREE = {"advantage": "group_centred", "responses_per_prompt": 4}


def constant(prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
    """A reward that costs nothing: the length of the answer."""
    del prompts, metadata
    return [float(len(response)) for response in responses]


def cases(place: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> the kind of recipe and the recipe, over the inputs in `place`."""
    lora = {"lora": {"rank": 8}}
    llama = {"config": {**LLAMA, "vocab_size": 16000}}
    checkpointing = {"activation_checkpointing": True}
    return {
        "ppo-full": ("ppo", _ppo(place, llama, prompt=96, rows=8)),
        "ppo-lora": ("ppo", _ppo(place, {"path": str(place / "base"), **lora}, prompt=96, rows=12, value=lora)),
        "ppo-checkpointing": (
            "ppo",
            _ppo(place, {**llama, **checkpointing}, prompt=992, rows=2, value=checkpointing),
        ),
        "group-vocabulary": (
            "ppo",
            _ppo(place, {"config": {**QWEN2, "vocab_size": 64000}}, prompt=96, rows=8, more=CRITIC_FREE),
        ),
        "sft-long": ("sft", _sft(place, llama["config"], max_tokens=1024, examples=2)),
        "reward": ("reward", _reward(place, GPT2, max_tokens=128, pairs=4)),
        # Not looked at when the two shares for the process and the allocator were set.
        "sft-microbatches": ("sft", _sft(place, QWEN2_DEEP, max_tokens=512, examples=6)),
        "dpo": ("dpo", _dpo(place, {"config": {**QWEN2, "vocab_size": 48000}}, max_tokens=192, pairs=4)),
        "sft-experts": ("sft", _sft(place, EXPERTS, max_tokens=512, examples=6)),
        "ppo-trunk": ("ppo", _ppo(place, llama, prompt=224, rows=6, value={"init_from": "trunk"})),
    }


def _run(place: Path) -> dict[str, Any]:
    return {"folder": str(place / "run"), "device": "cpu", "num_threads": 1, "tensorboard": False}


def _sources(place: Path) -> dict[str, Any]:
    return {"sources": [{"path": str(place / "rows.jsonl")}], "too_long": "truncate"}


def _ppo(
    place: Path,
    policy: dict[str, Any],
    *,
    prompt: int,
    rows: int,
    value: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    per_prompt = (more or {}).get("responses_per_prompt", 1)
    return {
        "run": _run(place),
        "model": policy,
        "tokenizer": {"path": str(place / "tokenizer")},
        "value": value or {},
        "data": {**_sources(place), "max_prompt_tokens": prompt},
        "reward": [{"kind": "function", "function": "plan:constant"}],
        "ppo": {
            "num_steps": 2,
            "prompts_per_step": rows // per_prompt,
            "epochs_per_step": 1,
            "minibatch_responses": rows,
            "tokens_per_microbatch": rows * (prompt + NEW_TOKENS),
            "rollout": {"max_new_tokens": NEW_TOKENS},
            **(more or {}),
        },
    }


def _sft(place: Path, config: dict[str, Any], *, max_tokens: int, examples: int) -> dict[str, Any]:
    return {
        "run": _run(place),
        "model": {"config": config},
        "tokenizer": {"path": str(place / "tokenizer")},
        "data": {**_sources(place), "max_tokens": max_tokens, "form": "text"},
        "sft": {
            "num_epochs": 2 * examples / NUM_ROWS,
            "examples_per_step": examples,
            "tokens_per_microbatch": max_tokens,
        },
    }


def _dpo(place: Path, model: dict[str, Any], *, max_tokens: int, pairs: int) -> dict[str, Any]:
    """The pairs of `_reward`, in two micro-batches."""
    shared = _reward(place, {}, max_tokens=max_tokens, pairs=pairs)
    learning = shared.pop("reward") | {"tokens_per_microbatch": pairs * max_tokens}
    return {**shared, "model": model, "dpo": learning}


def _reward(place: Path, config: dict[str, Any], *, max_tokens: int, pairs: int) -> dict[str, Any]:
    return {
        "run": _run(place),
        "model": {"config": config},
        "tokenizer": {"path": str(place / "tokenizer")},
        "data": {
            "sources": [{"path": str(place / "rows.jsonl"), "columns": {"prompt": "opening"}}],
            "too_long": "truncate",
            "max_tokens": max_tokens,
        },
        "reward": {
            "num_epochs": 2 * pairs / NUM_ROWS,
            "pairs_per_step": pairs,
            "tokens_per_microbatch": 2 * pairs * max_tokens,
        },
    }


def make_inputs(place: Path) -> None:
    """A tokenizer, rows longer than any limit, and a folder with a base for adapters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from proximo.data.tokenizer_training import train_tokenizer

    long = [" ".join(WORDS[(row + i * i) % len(WORDS)] for i in range(2500)) for row in range(NUM_ROWS)]
    tokenizer = train_tokenizer(long, vocab_size=300)
    tokenizer.save_pretrained(place / "tokenizer")
    keys = ("text", "prompt", "opening", "chosen", "rejected")
    lines = [
        json.dumps(dict(zip(keys, (text, text, text[:60], text[:340], text[100:440]), strict=True))) for text in long
    ]
    (place / "rows.jsonl").write_text("\n".join(lines) + "\n")
    config = AutoConfig.for_model(**{**LLAMA, "num_hidden_layers": 12, "vocab_size": 16000})
    AutoModelForCausalLM.from_config(config).save_pretrained(place / "base")
    tokenizer.save_pretrained(place / "base")


def status_mib(field: str) -> float:
    """Of this process, from /proc: VmRSS now, VmHWM at its greatest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def measure(kind: str, recipe: dict[str, Any]) -> None:
    """In a fresh process: run the recipe and print what it needed."""
    import torch

    from proximo.run.loop import run_trainer
    from proximo.run.options import RunOptions
    from proximo.trainer_kinds import recipe_kind

    torch.set_num_threads(1)
    checked: Any = recipe_kind(kind).schema.model_validate(recipe)
    before = status_mib("VmRSS")
    run_trainer(checked, RunOptions(overwrite=True, quiet=True))
    print(json.dumps(status_mib("VmHWM") - before))


def predict(kind: str, recipe: dict[str, Any]) -> float:
    """MiB, as `proximo plan` says it."""
    from proximo.plan.profiling import make_plans
    from proximo.trainer_kinds import recipe_kind

    checked: Any = recipe_kind(kind).schema.model_validate(recipe)
    (plan,) = make_plans(checked)
    return plan.peak / MIB


def child(*arguments: str) -> Any:
    """This script in a process of its own; what it prints last."""
    command = [sys.executable, __file__, *arguments]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parent}",
    }
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Predict, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="only this one; may be given again")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--measure", nargs=2, metavar=("KIND", "FILE"), help="what a run's process is started with")
    options = parser.parse_args()
    if options.measure:
        measure(options.measure[0], json.loads(Path(options.measure[1]).read_text()))
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        make_inputs(place)
        print("| case | predicted, MiB | measured, MiB | predicted / measured |\n|---|---|---|---|")
        for name, (kind, recipe) in cases(place).items():
            if options.case and name not in options.case:
                continue
            (place / "recipe.json").write_text(json.dumps(recipe))
            predicted = predict(kind, recipe)
            peaks = [child("--measure", kind, str(place / "recipe.json")) for _ in range(options.runs)]
            measured = statistics.median(peaks)
            results[name] = {"predicted_mib": round(predicted), "measured_mib": [round(peak) for peak in peaks]}
            print(f"| {name} | {predicted:.0f} | {measured:.0f} | {predicted / measured:.2f} |", flush=True)
    if options.runs > 1:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
