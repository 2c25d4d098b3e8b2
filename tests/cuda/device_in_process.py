"""The paths of CUDA on a CPU, with Triton's interpreter: python device_in_process.py FILE saves what they give.

Beside it is what a model gives as modules. Products whose results have another type than their operands are made of
float32 here. Triton's interpreter gets products in bf16 wrong, so that attention over the cache is tried in float32.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import warnings
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from builders import tiny_language_model, tiny_tokenizer
from proximo.models import backbone, heads
from proximo.models.attention import cache
from proximo.models.attention.packed import AttentionOptions
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.packing import pack, pack_responses
from proximo.models.precision.compute import casting
from proximo.models.precision.placement import Precision
from proximo.records import Prompt
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo_cpu import fused_functions, fused_layers, operators
from proximo_cuda import cache_kernels, decoder, row_kernels

MODELS = [
    ("qwen2", Precision.BF16, True),
    ("qwen3", Precision.FLOAT32, True),
    ("gemma2", Precision.FLOAT32, False),
    ("gpt2", Precision.FLOAT32, False),
]
"""Architecture, precision, and whether it has an adapter."""
_MM, _FAST_PATH = torch.mm, backbone.fast_path


def as_modules() -> None:
    """Models run as modules from now on."""
    backbone.fast_path = lambda *which: replace(_FAST_PATH(*which), attention=None, layers=None, decoder=None)


def as_on_a_device() -> None:
    """Tensors on the CPU count as those of a device from now on."""

    def mm(first: Tensor, second: Tensor, *, out_dtype: Any = None, out: Any = None) -> Tensor:
        wide = first if out_dtype is None else first.to(out_dtype)
        return _MM(wide, second.to(wide.dtype), out=out)

    def kernels_of(like: Tensor) -> Any:
        return row_kernels.KERNELS if like.dtype in (torch.float32, torch.bfloat16) else None

    def of_device(device: str, precision: Precision) -> Any:
        layers = lambda model: decoder.fused_layers(model, half=precision.is_half)  # noqa: E731
        path = _FAST_PATH(device, precision)
        return replace(path, attention=None, layers=layers, decoder=decoder.decoder_of)

    torch.mm = mm
    for module in (operators, fused_functions):
        module.is_on_cpu = lambda _: False
    for module in (operators, fused_functions, decoder):
        module.row_kernels_for = kernels_of
    heads.row_operations = kernels_of
    fused_layers.kernels_for = lambda _: None

    class Kernels(cache_kernels.CacheKernels):
        """In bf16, rows are written by the kernel, and attend by torch's operators."""

        @staticmethod
        def agree(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> bool:
            return keys.dtype is torch.float32 and cache_kernels.agree(query, keys, values, options)

    cache.RowCache._kernels = property(lambda _: Kernels())
    backbone.fast_path = of_device


def results(kind: str, precision: Precision, adapted: bool) -> dict[str, Any]:
    """Of one model: log-probs, entropies, gradients of all trainable tensors, and what it samples."""
    grouped = {} if kind == "gpt2" else {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    model = LanguageModel(tiny_language_model(kind, **grouped), precision=precision)
    if adapted:
        torch.manual_seed(0)
        model = model.with_adapter(LoRAOptions(rank=4))
        for name, tensor in model.trainable_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(tensor, std=0.1)
    shared = [3, 4, 5, 6, 7, 8, 9, 10, 11]
    batch = pack_responses([shared, [12, 13], shared], [[14, 15, 16], [17], [18, 19, 20, 21]])
    tokens = model.response_logprobs(batch, entropy=True)
    (tokens.logprobs.sum() + 0.1 * tokens.entropy.sum()).backward()
    gradients = [tensor.grad for _, tensor in model.trainable_parameters() if tensor.grad is not None]
    engine = LocalEngine(model, tiny_tokenizer(), eos_token_ids=[2], max_num_seqs=3)
    prompts = [Prompt(id=str(count), token_ids=tuple(range(5, 8 + count))) for count in range(4)]
    options, key = SamplingOptions(max_new_tokens=6), RandomKey(seed=0, purpose="rollout")
    drawn = engine.generate(prompts, num_samples=1, options=options, key=key)
    return {
        "logprobs": tokens.logprobs.detach(),
        "entropies": tokens.entropy.detach(),
        "gradients": torch.cat([each.flatten() for each in gradients]),
        "tokens": [each.token_ids for each in drawn],
        "sampled": [each.logprobs for each in drawn],
    }


def log_probs_of(targets: list[int], *, num_tokens: int) -> Tensor:
    """Of targets that may be outside the vocabulary."""
    normalisers, logprobs = torch.empty(2, len(targets))
    scores = torch.zeros(len(targets), num_tokens)
    row_kernels.KERNELS.token_statistics(scores, torch.tensor(targets), normalisers, logprobs, None)
    return logprobs


def errors_of_attention() -> list[float]:
    """Of all kinds of calls: heads in groups, other widths of values, windows, soft-caps, sinks."""
    found = []
    shapes = [(14, 2, 64, 64), (2, 2, 24, 8), (3, 1, 80, 80)]
    for (num, of_keys, width, of_values), kind in product(shapes, range(3)):
        query, keys, values = (
            torch.zeros(1, count, 1, size) for count, size in ((num, width), (of_keys, width), (of_keys, of_values))
        )
        more = {"softcap": 5.0, "sinks": torch.linspace(-1, 1, num)} if kind == 2 else {}
        options = AttentionOptions(sliding_window=20 if kind else None, **more)
        found.append(cache_kernels._error(query, keys, values, options))
    return found


class Launches(TorchDispatchMode):
    """Counts what would be launched on a device inside it: kernels of Triton, and operators that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __enter__(self) -> "Launches":
        self._plain = GridExecutor.__call__

        def counted(executor: Any, *arguments: Any, **more: Any) -> None:
            self.names[executor.fn.__name__] += 1
            with _disable_current_modes():
                self._plain(executor, *arguments, **more)

        GridExecutor.__call__ = counted
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        GridExecutor.__call__ = self._plain
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.name():
            self.names[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def launches_of_a_pass(num_layers: int) -> Counter[str]:
    """Of decoding one token in each of two rows, once weights are cast and joined."""
    model = LanguageModel(tiny_language_model("qwen2", num_hidden_layers=num_layers), precision=Precision.BF16)

    class Kernels(cache_kernels.CacheKernels):
        """The interpreter's bf16 is wrong, and its calls are only counted."""

        agree = staticmethod(lambda *_: True)

    cache.RowCache._kernels = property(lambda _: Kernels())
    with torch.inference_mode(), casting():
        prompts = pack([[3, 4, 5], [6, 7]])
        captured = cache.PromptCache(prompts.lengths)
        model.prefill(prompts, captured)
        held = cache.RowCache(num_rows=2, initial_tokens=8, max_tokens=16)
        with Launches() as placing:
            held.place_all(captured, {0: [0], 1: [1]})
        decode, tokens = model.decoder(), torch.tensor([8, 9])
        for _ in range(2):
            layout = held.advance(2)
            with Launches() as decoding_pass:
                decode(tokens, layout.positions, held, layout)
    return decoding_pass.names + Counter({f"placing {name}": count for name, count in placing.names.items()})


def main() -> None:
    warnings.simplefilter("ignore", RuntimeWarning)  # of numbers that a kernel masks
    as_modules()
    expected = [results(*each) for each in MODELS]
    exact = [results(kind, Precision.FLOAT32, adapted) for kind, _, adapted in MODELS]
    as_on_a_device()
    with torch.inference_mode():  # the first call may come from a rollout
        agree = row_kernels.agree(torch.device("cpu"))
    joins, join = [], decoder.joined_cast
    decoder.joined_cast = lambda *given: joins.append(1) or join(*given)
    found = {"expected": expected, "exact": exact, "found": [results(*each) for each in MODELS], "agree": agree}
    found |= {"num_joint": len(joins), "outside": log_probs_of([100, 5, -1], num_tokens=100)}
    row_kernels.agree.cache_clear()
    row_kernels.KERNELS.scale = lambda hidden, *_, **__: hidden * torch.nan  # no number is larger than it
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found["wrong"] = (
            row_kernels.agree(torch.device("cpu")),
            [text for each in said if "fused" in (text := str(each.message))],
        )
    found["attention"] = errors_of_attention()
    found["launches"] = launches_of_a_pass(3) - launches_of_a_pass(2)
    torch.save(found, sys.argv[1])


if __name__ == "__main__":
    main()
