"""The paths of CUDA on a CPU, with Triton's interpreter: python device_in_process.py FILE saves what they give.

Beside it is what a model gives as modules. Products whose results have another type than their operands are made of
float32 here. Triton's interpreter gets products in bf16 wrong, so that attention over the cache is tried in float32;
its chunks are of two blocks of 16 keys, for the interpreter is slow.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import warnings
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from builders import tiny_language_model, tiny_tokenizer
from proximo.models import backbone, heads
from proximo.models.attention import cache
from proximo.models.attention.packed import AttentionOptions
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.packing import pack, pack_responses
from proximo.models.precision import products
from proximo.models.precision.compute import casting
from proximo.models.precision.placement import Precision
from proximo.records import Prompt
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions, exponential_noise, plain_draw
from proximo_cpu import fused_functions, fused_layers, operators
from proximo_cuda import cache_kernels, decoder, row_kernels, sampling

MODELS = [
    ("qwen2", Precision.BF16, True),
    ("qwen3", Precision.FLOAT32, True),
    ("gemma2", Precision.FLOAT32, False),
    ("gpt2", Precision.FLOAT32, False),
]
"""Architecture, precision, and whether it has an adapter."""
_MM, _FAST_PATH = torch.mm, backbone.fast_path
cache_kernels.CHUNK, cache_kernels._BLOCK_BYTES = 32, 0


def place_of(tensor: Tensor) -> int:
    """Where its storage begins."""
    return tensor.untyped_storage().data_ptr()


def as_modules() -> None:
    """Models run as modules from now on."""
    backbone.fast_path = lambda *which: replace(_FAST_PATH(*which), attention=None, layers=None, decoder=None)


def as_on_a_device() -> None:
    """Tensors on the CPU count as those of a device from now on."""

    def mm(first: Tensor, second: Tensor, *, out_dtype: Any = None, out: Any = None) -> Tensor:
        if out_dtype is None:
            return _MM(first, second, out=out)
        with _disable_current_modes():  # one kernel on a device
            made = _MM(first.to(out_dtype), second.to(out_dtype), out=out)
        if Launches.inside is not None:
            Launches.inside.note("mm", (first, second), made)
        return made

    def kernels_of(like: Tensor) -> Any:
        return row_kernels.KERNELS if like.dtype in (torch.float32, torch.bfloat16) else None

    def of_device(device: str, precision: Precision) -> Any:
        layers = lambda model: decoder.fused_layers(model, half=precision.is_half)  # noqa: E731
        path = _FAST_PATH(device, precision)
        return replace(path, attention=None, layers=layers, decoder=decoder.decoder_of)

    torch.mm = mm
    products.has_kernels_for_all = heads.has_kernels_for_all = lambda _: True
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
    options, key = SamplingOptions(max_new_tokens=4), RandomKey(seed=0, purpose="rollout")
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
    """Counts what would be launched on a device inside it: kernels of Triton, and operators that are no views.

    Also the bytes of the matrices that each is given and that were there before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._made: set[int] = set()

    inside: "Launches | None" = None

    def note(self, name: str, given: Iterable[Any], *made: Tensor) -> None:
        """One launch."""
        self._made |= set(map(place_of, made))
        self.names[name] += 1
        matrices = [each for each in given if isinstance(each, Tensor) and each.dim() > 1]
        self.bytes[name] += sum(each.nbytes for each in matrices if place_of(each) not in self._made)

    def __enter__(self) -> "Launches":
        self._plain = GridExecutor.__call__

        def counted(executor: Any, *arguments: Any, **more: Any) -> None:
            self.note(executor.fn.__name__, arguments)
            with _disable_current_modes():
                self._plain(executor, *arguments, **more)

        GridExecutor.__call__, Launches.inside = counted, self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        GridExecutor.__call__, Launches.inside = self._plain, None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given, results = ([each for each in tree_leaves(one) if isinstance(each, Tensor)] for one in (args, made))
        if results and not func.is_view and not any(word in func.name() for word in ("empty", "view", "detach")):
            self.note(func._overloadpacket.__name__, given)
        self._made |= set(map(place_of, results)) - set(map(place_of, given))
        return made


PROMPT_TOKENS = 7
"""Of each of two rows whose storage is full after the pass, so that attention is given no more than it reads."""


def launches_of_a_pass(num_layers: int) -> dict[str, Launches]:
    """Of decoding one token in each of two rows, once weights are cast and joined: layers, head and draw."""
    model = LanguageModel(tiny_language_model("qwen2", num_hidden_layers=num_layers), precision=Precision.BF16)
    held = cache.RowCache(num_rows=2, initial_tokens=8, max_tokens=8)
    count = {name: Launches() for name in ("placing", "pass", "draw", "plain draw")}
    given = {"streams": torch.tensor([3, 4]), "positions": torch.tensor([1, 1]), "temperature": 1.0}

    class Kernels(cache_kernels.CacheKernels):
        """The interpreter's bf16 is wrong, and its calls are only counted."""

        agree = staticmethod(lambda *_: True)

    cache.RowCache._kernels = property(lambda _: Kernels())
    with torch.inference_mode(), casting():
        prompts = pack([list(range(3, 3 + PROMPT_TOKENS))] * 2)
        captured = cache.PromptCache(prompts.lengths)
        model.prefill(prompts, captured)
        decode = model.decoder()
        for number in range(2):  # the first casts
            with count["placing"] if number else nullcontext():
                held.place_all(captured, {0: [0], 1: [1]})
            layout = held.advance(2)
            with count["pass"] if number else nullcontext():
                logits = model.head.logits(decode(torch.tensor([8, 9]), layout.positions, held, layout))
        for name, draw in (("draw", sampling.draw), ("plain draw", plain_draw)):
            with count[name]:
                draw(logits, **given)
    return count


def launches_of_training(num_layers: int) -> Counter[str]:
    """Of the forward and backward pass of a micro-batch of one sequence, once weights are cast."""
    model = LanguageModel(tiny_language_model("qwen2", num_hidden_layers=num_layers), precision=Precision.BF16)
    batch = pack_responses([[3, 4, 5]], [[6, 7, 8]])
    with casting():
        for _ in range(2):
            with Launches() as launches:
                model.response_logprobs(batch).logprobs.sum().backward()
    return launches.names


@triton.jit
def store_bits(streams: Any, positions: Any, into: Any, width: tl.constexpr) -> None:
    """One program stores the bits of the noise of one row."""
    row, ids = tl.program_id(0), tl.arange(0, width)
    stream, position = tl.load(streams + row), tl.load(positions + row)
    tl.store(into + row * width + ids, sampling._bits(stream, position, ids))


def bits_of_the_noise() -> tuple[Tensor, Tensor]:
    """[8, 4096] of the kernel's hash, and those that torch's operators made their noise of, in float64."""
    streams, positions = torch.arange(8) * 0x1234567887654321, torch.arange(8) * 999
    stored = torch.empty(8, 4096, dtype=torch.int32)
    store_bits[(8,)](streams, positions, stored, width=4096)
    noise = exponential_noise(streams, positions, 4096, dtype=torch.float64)
    return stored, (-torch.expm1(-noise) / (2**-31 * (1 - 2**-24)) - 0.5).round().int()


def main() -> None:
    warnings.simplefilter("ignore", RuntimeWarning)  # of numbers that a kernel masks
    as_modules()
    modules = launches_of_training(3) - launches_of_training(2)
    expected = [results(*each) for each in MODELS]
    exact = [results(kind, Precision.FLOAT32, adapted) for kind, _, adapted in MODELS]
    as_on_a_device()
    with torch.inference_mode():  # the first call may come from a rollout
        agree = row_kernels.agree(torch.device("cpu"))
    joins, join = [], decoder.joined_cast
    decoder.joined_cast = lambda *given: joins.append(1) or join(*given)
    found = {"expected": expected, "exact": exact, "found": [results(*each) for each in MODELS], "agree": agree}
    found |= {"num_joint": len(joins), "outside": log_probs_of([100, 5, -1], num_tokens=100)}
    found["training"] = {"modules": modules, "fused": launches_of_training(3) - launches_of_training(2)}
    row_kernels.agree.cache_clear()
    row_kernels.KERNELS.scale = lambda hidden, *_, **__: hidden * torch.nan  # no number is larger than it
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found["wrong"] = (
            row_kernels.agree(torch.device("cpu")),
            [text for each in said if "fused" in (text := str(each.message))],
        )
    found["attention"] = errors_of_attention()
    passes = {num_layers: launches_of_a_pass(num_layers) for num_layers in (2, 3)}
    found["launches"] = {num: {name: each.names for name, each in parts.items()} for num, parts in passes.items()}
    found["bytes"] = passes[3]["pass"].bytes
    found["bits"] = bits_of_the_noise()
    torch.save(found, sys.argv[1])


if __name__ == "__main__":
    main()
