"""Sections on speed and memory: decoding, training, where the time goes, the planner's memory, options of training."""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from floor import Lengths, training_flops
from gpu.bench import Bench, CannotRun
from gpu.floors import decode_bytes
from gpu.made import TINY, config_of, engine_of, fast_trainer, generated, language_model, prompts_of, tokenizer_of
from torch.profiler import ProfilerActivity, profile
from work import SIZES, Job

from proximo import PPOTrainer
from proximo.models.precision.placement import use_deterministic_kernels
from proximo.rollout.decoding_graphs import LEAST_PASSES

LARGE_GIB = 120
"""A device with more memory than this trains 7B too."""
SMALL_GIB = 24
"""The memory of the last row of `table`."""
SHAPE_KEYS = """model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
num_key_value_heads max_position_embeddings tie_word_embeddings"""


def rollout_speed(bench: Bench) -> dict[str, Any]:
    """Tokens per second of the built-in engine, beside what memory bandwidth allows."""
    cases = [("qwen-0.5b", 64, 256), ("qwen-0.5b", 256, 256), ("qwen-1.5b", 64, 128)]
    rows, model, last = [], None, ""
    for size, num_rows, new in [(TINY, 4, 12)] if bench.smoke else cases:
        if model is None or size != last:
            model = None
            bench.free()
            model, last = language_model(size, device=bench.device), size
        engine, prompts = engine_of(model, size, rows=num_rows), prompts_of(num_rows, 128, size)
        generated(engine, prompts, new_tokens=8)
        bench.free()
        lengths: list[int] = []

        def work(engine: Any = engine, prompts: Any = prompts, new: int = new, lengths: list[int] = lengths) -> None:
            lengths[:] = [len(response.token_ids) for response in generated(engine, prompts, new_tokens=new)]

        first, seconds = bench.seconds(work), bench.seconds(work)
        floor = decode_bytes(SIZES[size], Lengths([128] * num_rows, lengths)) / bench.rates["bytes_per_second"]
        row = {"size": size, "rows": num_rows, "new": new, "seconds": seconds, "first_run_s": first}
        row |= {"tokens_per_second": sum(lengths) / seconds, "ms_per_pass": 1e3 * seconds / max(lengths)}
        rows.append({**row, "share_of_bandwidth_floor": floor / seconds, "peak_GiB": bench.peak_gib()})
    return {"rollouts": rows}


def decode_profile(bench: Bench) -> dict[str, Any]:
    """What decoding does, for each pass, with prompts and a capture: kernels, times, and where the host waits."""
    size, rows, new = (TINY, 4, 9) if bench.smoke else ("qwen-0.5b", 64, 10 * LEAST_PASSES + 1)
    engine, prompts = engine_of(language_model(size, device=bench.device), size, rows=rows), prompts_of(rows, 128, size)
    return _profiled(bench, lambda: generated(engine, prompts, new_tokens=new), per=new - 1)


def training_speed(bench: Bench) -> dict[str, Any]:
    """Whole PPO steps: seconds of each call, MFU of training, peak memory."""
    cases = [("qwen-0.5b", "critic", 64, 128, 256), ("qwen-1.5b", "lora", 64, 128, 128)]
    return {"steps": _steps(bench, [(TINY, "critic", 8, 128, 12)] if bench.smoke else cases, keeps=True)}


def table(bench: Bench) -> dict[str, Any]:
    """The same at sizes that people train: the first is verl's quickstart, 256 prompts and responses of 512 tokens.

    With deterministic kernels, and the first once more without; the last in the memory of a small card.
    """
    cases = [("qwen-0.5b", "critic", 256, 512, 512), ("qwen-1.5b", "critic", 128, 256, 256)]
    cases += [("qwen-4b", "lora", 64, 256, 128), ("qwen-7b", "lora", 64, 256, 128)]
    small = ("qwen-4b", "4bit", 64, 256, 128)
    if bench.smoke:
        cases, small = [(TINY, "lora", 8, 20, 12)], (TINY, "4bit", 8, 20, 12)
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30 if bench.is_cuda else LARGE_GIB
    steps = _steps(bench, cases if memory > LARGE_GIB else cases[:3], deterministic=True)
    if find_spec("bitsandbytes") is None:
        bench.skipped.append("4bit (bitsandbytes is not installed)")
    else:
        if bench.is_cuda:
            torch.cuda.set_per_process_memory_fraction(min(1.0, SMALL_GIB / memory))
        try:
            steps += _steps(bench, [small], deterministic=True)
        finally:
            if bench.is_cuda:
                torch.cuda.set_per_process_memory_fraction(1.0)
    return {"steps": steps + _steps(bench, cases[:1])}


def _steps(
    bench: Bench, cases: Sequence[tuple[str, str, int, int, int]], *, keeps: bool = False, deterministic: bool = False
) -> list[dict[str, Any]]:
    """Cases of model, kind, prompts, their tokens, and new tokens: the second step of each.

    `keeps`: the first trainer stays, for `training_profile`.
    """
    use_deterministic_kernels(deterministic, torch.device(bench.device))
    rows = []
    for case in cases:
        bench.free()
        name: dict[str, Any] = dict(zip(("size", "kind", "rows", "prompt", "new"), case, strict=True))
        name["deterministic"] = deterministic
        rows.append(bench.case(name, partial(_step, bench, *case, keeps=keeps)))
    return rows


def _step(bench: Bench, size: str, kind: str, *shape: int, keeps: bool) -> dict[str, Any]:
    num_rows, prompt_tokens, new = shape
    trainer, prompts = _speed_trainer(bench, size, kind, rows=num_rows, tokens=(prompt_tokens, new))
    for _ in range(2):
        outcome = trainer.run_step(prompts=prompts)
        trainer.metrics(outcome)
    lengths = Lengths([prompt_tokens] * num_rows, [len(each.response.token_ids) for each in outcome.experience.scored])
    adapter = 16 * (kind != "critic")
    seconds, job = outcome.seconds, Job(models="", size=size, regime="none", epochs=1, adapter_rank=adapter)
    training = sum(took for call, took in seconds.items() if call.startswith("train"))
    bench.measured_gib[size] = bench.peak_gib()
    if keeps and bench.kept is None:
        bench.kept = trainer, prompts
    else:
        trainer.close()
    row = {"tokens": sum(lengths.whole), "step_s": sum(seconds.values()), "peak_GiB": bench.peak_gib()}
    row["sampled_tokens_per_second"] = sum(lengths.responses) / seconds["generate"]
    row["trained_tokens_per_second"] = sum(lengths.whole) / training
    return {**row, "mfu": training_flops(job, lengths) / training / bench.rates["bf16"], **seconds}


def _speed_trainer(bench: Bench, size: str, kind: str, *, rows: int, tokens: tuple[int, int]) -> tuple[PPOTrainer, Any]:
    """With prompts and responses of so many tokens, and two updates a step."""
    prompt_tokens, new_tokens = tokens
    config = {
        "prompts_per_step": rows,
        "minibatch_responses": rows // 2,
        "tokens_per_microbatch": 2048 if kind == "4bit" else 32768,
        "rollout": {"max_new_tokens": new_tokens, "max_num_seqs": rows},
    }
    return fast_trainer(kind, size, config, device=bench.device), prompts_of(rows, prompt_tokens, size)


def training_profile(bench: Bench) -> dict[str, Any]:
    """What one PPO step of the first case of `training_speed` does after its rollout, whose responses are kept."""
    size, rows, new = (TINY, 8, 12) if bench.smoke else ("qwen-0.5b", 64, 256)
    trainer, prompts = bench.kept or _speed_trainer(bench, size, "critic", rows=rows, tokens=(128, new))
    bench.kept = None
    responses = [each.response for each in trainer.run_step(prompts=prompts).experience.scored]
    trainer.roles.policy.engine.generate = lambda *_, **__: responses
    found = _profiled(bench, lambda: trainer.run_step(prompts=prompts), per=1)
    trainer.close()
    return found


def _profiled(bench: Bench, work: Callable[[], Any], *, per: int) -> dict[str, Any]:
    """Of one of `per` parts of the work."""
    work()
    found = _waits(work) if bench.is_cuda else {}
    wall = bench.seconds(work)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.is_cuda else [])]
    with profile(activities=activities) as seen:
        work()
        bench.synchronise()
    events = seen.key_averages()
    kernels = [event for event in events if not bench.is_cuda or str(event.device_type).endswith("CUDA")]

    def spent(event: Any) -> float:
        return event.self_device_time_total if bench.is_cuda else event.self_cpu_time_total

    total = sum(map(spent, kernels)) / 1e6
    longest = sorted(kernels, key=spent, reverse=True)[:15]
    launches = [event for event in events if "LaunchKernel" in event.key or "cudaGraphLaunch" in event.key]
    return {
        **found,
        "wall_ms": 1e3 * wall / per,
        "device_busy_ms": 1e3 * total / per,
        "device_busy_share": total / wall,
        "kernels": sum(event.count for event in kernels) / per,
        "launches": {event.key: event.count / per for event in launches},
        "top": [{"ms": 1e-3 * spent(each) / per, "count": each.count / per, "name": each.key[:90]} for each in longest],
    }


def _waits(work: Callable[[], Any]) -> dict[str, Any]:
    """How often the host waits for the device, and where."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in said if "synchroniz" in str(each.message)]
    places = Counter(f"{Path(each.filename).name}:{each.lineno}" for each in waits)
    return {"waits": len(waits), "waits_at": dict(places.most_common(12))}


def plan(bench: Bench) -> dict[str, Any]:
    """What the planner says of the run of `training_speed`, beside what was measured there."""
    size, rows, new = (TINY, 8, 12) if bench.smoke else ("qwen-0.5b", 64, 256)
    path = bench.work / "plan.yaml"
    path.write_text(yaml.safe_dump(_plan_recipe(bench, size, rows=rows, new_tokens=new)))
    said = bench.proximo("plan", path, "--kind", "ppo", seconds=90)
    bench.hold(said["status"] == 0, f"proximo plan ended with status {said['status']}")
    return {"measured_GiB": bench.measured_gib.get(size, "training_speed was not run"), "plan": said["said"]}


def _plan_recipe(bench: Bench, size: str, *, rows: int, new_tokens: int) -> dict[str, Any]:
    folder, config = bench.work / f"model-{size}", config_of(size)
    config.save_pretrained(folder)
    tokenizer_of(size).save_pretrained(folder)
    shape = {key: value for key, value in config.to_dict().items() if key in SHAPE_KEYS.split()}
    rate = {"learning_rate": 1e-6}
    problems = {"function": "proximo.recipes.arithmetic:problems", "kwargs": {"num_rows": 64}}
    return {
        "run": {"folder": str(bench.work / "run"), "device": bench.device, "precision": "bf16"},
        "tokenizer": {"path": str(folder)},
        "model": {"config": shape},
        "value": {"config": shape},
        "data": {"sources": [problems], "max_prompt_tokens": 128},
        "reward": [{"kind": "function", "name": "correct", "function": "proximo.recipes.arithmetic:correct"}],
        "ppo": {
            "num_steps": 2,
            "prompts_per_step": rows,
            "epochs_per_step": 1,
            "minibatch_responses": rows // 2,
            "tokens_per_microbatch": 32768,
            "rollout": {"max_new_tokens": new_tokens, "max_num_seqs": rows},
            "policy_optimizer": rate,
            "value_optimizer": rate,
        },
    }


def options(bench: Bench) -> dict[str, Any]:
    """Whether options of training run, and what they do to the peak: two PPO steps with each."""
    return {"options": [_with_option(bench, name) for name in ("plain", "activation_checkpointing", "in_backward")]}


def compiled(bench: Bench) -> dict[str, Any]:
    """torch.compile of the layers: the first step compiles, which takes a minute or more."""
    if bench.smoke:
        raise CannotRun("compiling takes minutes on a CPU")
    return {"options": [_with_option(bench, "compile")]}


def _with_option(bench: Bench, name: str) -> dict[str, Any]:
    size, rows = (TINY, 4) if bench.smoke else ("qwen-0.5b", 16)
    config: dict[str, Any] = {
        "prompts_per_step": rows,
        "minibatch_responses": rows,
        "tokens_per_microbatch": 65536,
        "rollout": {"max_new_tokens": 16 if bench.smoke else 64, "max_num_seqs": rows},
    }
    if name == "in_backward":
        rate = {"learning_rate": 1e-6, "in_backward": True, "max_gradient_norm": None, "non_finite_gradient": "stop"}
        config |= {"policy_optimizer": rate, "value_optimizer": rate}

    def work() -> Mapping[str, Any]:
        trainer, prompts = fast_trainer("critic", size, config, device=bench.device), prompts_of(rows, 64, size)
        if name == "activation_checkpointing":
            trainer.policy.use_activation_checkpointing()
        elif name == "compile":
            trainer.policy.compile("inductor")
        first = bench.seconds(lambda: trainer.run_step(prompts=prompts))
        outcome = trainer.run_step(prompts=prompts)
        trainer.close()
        return {"peak_GiB": bench.peak_gib(), "first_step_s": first, "train_policy_s": outcome.seconds["train_policy"]}

    bench.free()
    return bench.case({"option": name}, work)
