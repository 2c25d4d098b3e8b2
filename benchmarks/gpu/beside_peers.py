"""Sections that are the line to beat: transformers' `generate`, a plain padded training step, TRL's PPO."""

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from gpu.bench import ROOT, Bench, CannotRun, brief
from gpu.floors import shares
from gpu.made import TINY, causal, config_of, prompts_of
from work import SIZES, Job, make_models

SIDES = {"proximo": "side_proximo.py", "trl": "side_trl.py"}
STOP_PROBABILITY = 1 / 300


def peers_generate(bench: Bench) -> dict[str, Any]:
    """transformers' `generate` on a rollout of 64 x (128 + 128): dynamic cache, static cache, continuous batching."""
    from transformers import AutoModelForCausalLM

    size, rows, new = (TINY, 4, 12) if bench.smoke else ("qwen-0.5b", 64, 128)
    torch.manual_seed(0)
    with torch.device(bench.device):
        config = config_of(size)
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model, prompts = made.eval(), [prompt.token_ids for prompt in prompts_of(rows, 128, size)]
    ids = torch.tensor(prompts, device=bench.device)
    fixed = {"do_sample": True, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0, "top_k": 0}

    def padded(**more: Any) -> Callable[[], Any]:
        return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **fixed, **more)

    def continuous() -> Any:
        from transformers import GenerationConfig

        requests = [list(prompt) for prompt in prompts]
        return model.generate_batch(inputs=requests, generation_config=GenerationConfig(eos_token_id=-1, **fixed))

    cases = {"dynamic": padded(), "static": padded(cache_implementation="static")}
    if bench.is_cuda:
        cases["continuous"] = continuous
    rows_found = []
    for name, work in cases.items():
        if bench.section_left() < 20:
            bench.skipped.append(f"{name} (less than 20 s left)")
            continue

        def measured(work: Callable[[], Any] = work) -> dict[str, float]:
            with torch.no_grad():
                first, seconds = bench.seconds(work), bench.seconds(work)
            speed = {"tokens_per_second": rows * new / seconds, "ms_per_pass": 1e3 * seconds / new}
            return {**speed, "first_run_s": first}

        rows_found.append(bench.case({"cache": name, "rows": rows, "new": new}, measured))
    return {"generate": rows_found}


def peers_training(bench: Bench) -> dict[str, Any]:
    """A plain padded step of transformers: bf16 autocast over float32 weights, all logits, fused AdamW."""
    size, rows, length, micro = (TINY, 4, 20, 2) if bench.smoke else ("qwen-0.5b", 64, 384, 16)
    model: Any = causal(size, device=bench.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=bench.is_cuda)
    ids = torch.tensor([prompt.token_ids for prompt in prompts_of(rows, length, size)], device=bench.device)

    def step() -> None:
        for part in ids.split(micro):
            with torch.autocast(bench.device.partition(":")[0], dtype=torch.bfloat16):
                logits = model(input_ids=part, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), part[:, 1:].flatten())
            (loss * len(part) / rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    bench.free()
    seconds = bench.median_seconds(step, repeats=2)
    rate = 6 * model.num_parameters() * rows * length / seconds
    found = {"tokens_per_second": rows * length / seconds, "seconds": seconds, "peak_GiB": bench.peak_gib()}
    return {**found, "mfu": rate / bench.rates["bf16"]}


def cases(size: str, *, device: str, smoke: bool = False) -> dict[str, Job]:
    """Name -> the work. `short` fits into a short run.

    `batch`: 64 prompts, no response ends early. `ends`: each token ends its response with a probability of 1 in 300.
    `group`: 8 prompts with 8 responses each. All three have responses of up to 1024 tokens.
    """
    batch = Job(
        models="",
        size=size,
        regime="none",
        precision="bf16",
        prompt_tokens=128,
        new_tokens=1024,
        epochs=1,
        steps=2,
        device=device,
    )
    if smoke:
        batch = replace(batch, num_prompts=4, prompt_tokens=8, new_tokens=8, minibatch=2, steps=1)
    return {
        f"{size}-short": replace(batch, new_tokens=min(128, batch.new_tokens), minibatch=batch.num_prompts // 2),
        f"{size}-batch": batch,
        f"{size}-ends": replace(batch, regime="random"),
        f"{size}-group": replace(batch, num_prompts=batch.num_prompts // (2 if smoke else 8), group=2 if smoke else 8),
    }


def peers_trl(bench: Bench) -> dict[str, Any]:
    """PPO steps of TRL and of Proximo on the same work, each in a process of its own; as many cases as time allows."""
    if importlib.util.find_spec("trl") is None:
        raise CannotRun("TRL is not installed in this Python (trl==1.12.0)")
    rows = []
    for size in (TINY,) if bench.smoke else ("qwen-0.5b", "qwen-1.5b"):
        for name, job in cases(size, device=bench.device, smoke=bench.smoke).items():
            if bench.section_left() < 60:
                bench.skipped.append(f"{name} (less than 60 s left)")
                continue
            rows += [side_row(bench, name, side, _with_models(bench, job)) for side in SIDES]
    return {"sides": rows}


def side_row(bench: Bench, name: str, side: str, job: Job) -> dict[str, Any]:
    """What a side took for it, or how it failed. One that the section's end cut is skipped by its name."""
    file = job.save(bench.work / f"{name}.json")
    begin = time.time()
    done = bench.process(
        [sys.executable, ROOT / "benchmarks" / "peers" / SIDES[side], file], seconds=bench.section_left()
    )
    row = {"case": name, "side": side}
    if done["status"] == 124:
        bench.skipped.append(f"{name} of {side} (cut after {time.time() - begin:.0f} s)")
        return {**row, **brief(done)}
    if done["status"] != 0:
        lines = done["said"].strip().splitlines() or [f"status {done['status']}"]
        bench.wrong.append(f"{name} of {side}: {lines[-1]}"[:300])
        return {**row, **brief(done)}
    found = json.loads(done["said"].splitlines()[-1])
    return {**row, **shares(job, found["steps"], bench.rates), "peak_GiB": found["peak_mib"] / 1024}


def _with_models(bench: Bench, job: Job) -> Job:
    """Written where no case before has left them."""
    folder = bench.work / f"models-{job.size}-{job.regime}"
    if not (folder / "tokenizer" / "tokenizer_config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        make_models(folder, SIZES[job.size], regime=job.regime, stop_probability=STOP_PROBABILITY)
    return replace(job, models=str(folder))
