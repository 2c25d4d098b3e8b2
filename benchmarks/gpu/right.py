"""Sections on whether the device computes what a CPU computes: passes, PPO steps, attention, sampler and learner."""

import platform
import warnings
from collections.abc import Callable
from typing import Any

import torch
from gpu.bench import Bench
from gpu.floors import bandwidth, product_rate
from gpu.made import (
    ARCHITECTURES,
    TINY,
    OperatorCounts,
    causal,
    engine_of,
    generated,
    language_model,
    prompts_of,
    relative,
    tiny_trainer,
)
from torch import Tensor

from proximo.models.attention.varlen import names_grouped_heads, varlen_kernel
from proximo.models.language import LanguageModel
from proximo.models.packing import pack_responses
from proximo.models.precision.placement import Precision

WAYS = (("cpu", "float32"), ("device", "float32"), ("device", "bf16"))
"""The first is what the others are compared with."""


def environment(bench: Bench) -> dict[str, Any]:
    """Versions, and the rates that the shares of the other sections are of."""
    import transformers

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "varlen_kernel_names_grouped_heads": names_grouped_heads(varlen_kernel()),
    }
    if bench.is_cuda:
        found["device"] = torch.cuda.get_device_name()
        query = "--query-gpu=name,driver_version,memory.total,clocks.sm"
        found["smi"] = bench.process(["nvidia-smi", query, "--format=csv,noheader"], seconds=10)["said"].strip()
    bench.rates["bytes_per_second"] = bandwidth(bench, num_bytes=2**31 if bench.is_cuda else 2**24)
    found["GB_per_second"] = bench.rates["bytes_per_second"] / 1e9
    for name, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32)):
        bench.rates[name] = product_rate(bench, dtype, width=8192 if bench.is_cuda else 256)
        found[f"tflops_{name}"] = bench.rates[name] / 1e12
    doctor = bench.proximo("doctor", seconds=40)
    bench.hold(doctor["status"] == 0, f"proximo doctor ended with status {doctor['status']}")
    return {**found, "doctor": doctor["said"]}


def correctness(bench: Bench) -> dict[str, Any]:
    """Log-probs, entropies and gradients of each architecture: float32 and bf16 here beside float32 on a CPU."""
    rows = []
    for model_type in ARCHITECTURES:
        exact: tuple[Tensor, ...] = ()
        for where, how in WAYS:
            device = "cpu" if where == "cpu" else bench.device
            if not exact:
                exact, _ = _answers(model_type, device=device, how=how)
                continue
            compare = _compared(bench, model_type, device=device, how=how, exact=exact)
            rows.append(bench.case({"model": model_type, "where": f"{where}-{how}"}, compare))
    return {"rows": rows}


def _compared(
    bench: Bench, model_type: str, *, device: str, how: str, exact: tuple[Tensor, ...]
) -> Callable[[], dict[str, Any]]:
    def work() -> dict[str, Any]:
        (logprobs, entropies, gradients), attention_operators = _answers(model_type, device=device, how=how)
        away = (logprobs - exact[0]).abs()
        found = {"logprob_max": away.max().item(), "logprob_mean": away.mean().item()}
        found |= {"entropy_max": (entropies - exact[1]).abs().max().item(), "gradient": relative(gradients, exact[2])}
        exactly = {"logprob_max": 1e-4, "gradient": 1e-4}
        for key, bound in (exactly if how == "float32" else {"logprob_mean": 0.02, "gradient": 0.05}).items():
            bench.hold(found[key] <= bound, f"{model_type} in {how}: {key} is {found[key]:.2g}, above {bound}")
        return {**found, "attention": attention_operators}

    return work


def _answers(model_type: str, *, device: str, how: str) -> tuple[tuple[Tensor, ...], dict[str, int]]:
    """(log-probs, entropies, all gradients) and, of a second pass, the operators of attention.

    Three responses share a prompt. Kernels of Triton stand aside where operators are recorded.
    """
    draw = torch.Generator().manual_seed(0)
    prompt_lengths, response_lengths = (7, 9, 20, 3), (5, 31, 12, 1, 64, 17)
    ids = [torch.randint(4, 256, (length,), generator=draw).tolist() for length in prompt_lengths + response_lengths]
    prompts = [ids[0], ids[1], ids[1], ids[1], ids[2], ids[3]]
    model = LanguageModel(causal(TINY, model_type=model_type, wide=True).to(device), precision=Precision(how))
    batch = pack_responses(prompts, ids[4:], device=device)
    tokens = model.response_logprobs(batch, entropy=True)
    assert tokens.entropy is not None
    (tokens.logprobs.sum() + 0.1 * tokens.entropy.sum()).backward()
    gradients = [weight.grad.flatten().cpu() for weight in model.model.parameters() if weight.grad is not None]
    answers = tokens.logprobs.detach().cpu(), tokens.entropy.detach().cpu(), torch.cat(gradients)
    with torch.no_grad(), OperatorCounts() as operators:
        model.response_logprobs(batch)
    return answers, operators.attention()


def ppo_steps(bench: Bench) -> dict[str, Any]:
    """Two whole steps of each kind of run: float32 here moves the weights as on a CPU, bf16 within the usual bounds."""
    rows = []
    for kind in ("critic", "group", "lora", "trunk"):
        exact: dict[str, Any] = {}
        for where, how in WAYS:
            name = {"kind": kind, "where": f"{where}-{how}"}
            steps = _two_steps(kind, device="cpu" if where == "cpu" else bench.device, how=how)
            row = bench.case(name, steps)
            if "failed" not in row:
                texts, moved = row.pop("texts"), row.pop("moved")
                exact = exact or {"texts": texts, "moved": moved}
                pairs = zip(texts, exact["texts"], strict=True)
                row["same_responses"] = sum(one == other for one, other in pairs) / len(texts)
                row["update"] = relative(moved, exact["moved"])
                _hold_steps(bench, row, how=how)
            rows.append(row)
    return {"rows": rows}


def _hold_steps(bench: Bench, row: dict[str, Any], *, how: str) -> None:
    """An update's bound is wide, for Adam makes whole steps of the rounding of gradients that are nearly 0."""
    name = f"{row['kind']} on {row['where']}"
    if how == "float32":
        bench.hold(row["same_responses"] == 1, f"{name}: {1 - row['same_responses']:.0%} of the responses differ")
        bench.hold(row["update"] < 0.01, f"{name}: the update is {row['update']:.2g} away, at least 0.01")
    mean = row["mean_abs_log_ratio"]
    bench.hold(mean < 0.02, f"{name}: the mean log-ratio of the first minibatch is {mean:.2g}, at least 0.02")
    bench.hold(not row["warned"], f"{name}: {row['warned']}")


def _two_steps(kind: str, *, device: str, how: str) -> Callable[[], dict[str, Any]]:
    def work() -> dict[str, Any]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer = tiny_trainer(kind, device=device, how=how)
            before = {name: weight.detach().clone() for name, weight in trainer.policy.trainable_parameters()}
            outcomes = [trainer.run_step(prompts=prompts_of(8, 12, TINY)) for _ in range(2)]
            metrics = trainer.metrics(outcomes[0])
        first = {name.split("/")[1]: each.value for name, each in metrics.items() if name.startswith("first_mini")}
        weights = trainer.policy.trainable_parameters()
        return {
            **first,
            "warned": sorted({str(each.message)[:120] for each in said if "first minibatch" in str(each.message)}),
            "texts": [scored.response.token_ids for scored in outcomes[1].experience.scored],
            "moved": torch.cat([(weight.detach() - before[name]).flatten().cpu() for name, weight in weights]),
        }

    return work


def sampler_and_learner(bench: Bench) -> dict[str, Any]:
    """In bf16, at a real width: the sampler's log-probs beside the learner's, and the same responses once more."""
    size, rows, new = (TINY, 4, 12) if bench.smoke else ("qwen-0.5b", 64, 64)
    model = language_model(size, device=bench.device)
    engine, prompts = engine_of(model, size, rows=rows), prompts_of(rows, 32, size)
    responses, again = (generated(engine, prompts, new_tokens=new) for _ in range(2))
    ids = [prompt.token_ids for prompt in prompts], [response.token_ids for response in responses]
    batch = pack_responses(*ids, device=bench.device)
    with torch.no_grad():
        learned = model.response_logprobs(batch).logprobs.float().cpu()
        with OperatorCounts() as operators:
            model.response_logprobs(batch)
    ratio = learned - torch.cat([response.logprobs for response in responses])
    same = sum(one.token_ids == other.token_ids for one, other in zip(responses, again, strict=True)) / rows
    mean, clipped = ratio.abs().mean().item(), ((ratio.exp() - 1).abs() > 0.2).float().mean().item()
    bench.hold(mean < 0.02, f"the mean log-ratio is {mean:.2g}, at least 0.02")
    bench.hold(clipped < 0.01, f"{clipped:.1%} of the ratios are clipped, at least 1%")
    bench.hold(same == 1, f"{1 - same:.0%} of the responses differ when they are sampled again")
    found = {"mean_abs_log_ratio": mean, "max_abs_log_ratio": ratio.abs().max().item(), "clip_fraction": clipped}
    return {**found, "same_responses_again": same, "attention_of_learner": operators.attention()}
