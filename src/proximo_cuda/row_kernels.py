"""Work on rows by the kernels of `programs.py`: what `proximo_cpu.row_kernels` is on a CPU.

Tensors are float32 or bf16 on CUDA, as `row_kernels_for` checks; weights of norms are float32. Inputs that are not
contiguous are copied, unless a function takes strides. On a device the kernels are compared with torch's operators
before they are used (`agree`).

Legend: T rows, B rows of a decode step, D width, H heads, K head width, C rows of scores, V vocabulary.
"""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from proximo.rollout.sampling import plain_draw
from proximo_cuda import programs
from proximo_cuda.needs import is_right
from proximo_cuda.sampling import draw, draws_as

_BLOCK = 1024
_WIDE_BLOCK = 4096
"""Numbers that a program works on at a time: of an activation, and of scores."""
_PARTS = 512
"""Programs of a norm's backward pass. Each sums its rows' gradients of the weight."""
_LEAST_ROWS = 4
"""Of such a program."""
_TRIED = 42
"""Rows of a trial. The last program of a backward pass has fewer than the others."""


class RowKernels:
    """Each method launches one kernel. The core calls those of `RowOperations`."""

    def norm(
        self, hidden: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """hidden [T, D] -> w * h * r [T, D] in `dtype`, and r = 1 / sqrt(mean(h^2) + epsilon) [T, 1].

        `dtype`: None for that of `hidden`.
        """
        normed, inverse, _ = self.add_norm(hidden, None, weight, epsilon, dtype)
        return normed, inverse

    def add_norm(
        self, hidden: Tensor, added: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `norm`, of hidden [T, D] plus `added` [T, D], and that sum, in the type of `hidden`."""
        if hidden.stride(1) != 1:
            hidden = hidden.contiguous()
        num_rows, width = hidden.shape
        summed = hidden if added is None else hidden.new_empty(num_rows, width)
        normed = torch.empty(num_rows, width, dtype=dtype or hidden.dtype, device=hidden.device)
        inverse = torch.empty(num_rows, 1, dtype=torch.float32, device=hidden.device)
        given = added if added is None else added.contiguous()
        launch: Any = programs.norm[(num_rows,)]
        more = {"width": width, "lanes": triton.next_power_of_2(width), "adds": added is not None}
        tensors = (hidden, hidden if given is None else given, summed, weight, normed, inverse)
        launch(*tensors, hidden.stride(0), epsilon, **more)
        return normed, inverse, summed

    def scale(self, hidden: Tensor, inverse: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Recomputes what `norm` returned [T, D] from r."""
        hidden = hidden.contiguous()
        num_rows, width = hidden.shape
        normed = torch.empty(num_rows, width, dtype=dtype or hidden.dtype, device=hidden.device)
        launch: Any = programs.scale[(num_rows,)]
        launch(hidden, inverse, weight, normed, width=width, lanes=triton.next_power_of_2(width))
        return normed

    def norm_backward(  # noqa: PLR0917 - as that of a CPU
        self,
        gradient: Tensor,
        hidden: Tensor,
        inverse: Tensor,
        weight: Tensor,
        more: Tensor | None,
        into: Tensor,
    ) -> Tensor:
        """Backward of `norm`: `gradient` [T, D] is that of its output. Returns the gradient of w [D].

        Writes the gradient of h, plus `more` if given, to `into` [T, D], which may be `gradient`.
        """
        assert into.is_contiguous(), "gradients lie row by row"
        gradient, hidden = gradient.contiguous(), hidden.contiguous()
        given = gradient if more is None else more.contiguous()
        num_rows, width = hidden.shape
        rows_each = max(_LEAST_ROWS, -(-num_rows // _PARTS))
        parts = -(-num_rows // rows_each)
        sums = torch.empty(parts, width, dtype=torch.float32, device=hidden.device)
        launch: Any = programs.norm_backward[(parts,)]
        sizes = {"width": width, "lanes": triton.next_power_of_2(width), "adds": more is not None}
        launch(gradient, hidden, inverse, weight, given, into, sums, num_rows, rows_each, **sizes)
        return sums.sum(dim=0)

    def rotate(self, heads: Tensor, cosines: Tensor, sines: Tensor, into: Tensor, *, back: bool) -> None:
        """Rotary position embedding, or with `back` its inverse: heads [T, H, K], cosines and sines [T, 1, K / 2].

        `into` may be `heads`. Rows and heads of both may have any strides.
        """
        if heads.stride(2) != 1:
            heads = heads.contiguous()
        if cosines.stride() != sines.stride() or cosines.stride(2) != 1:
            cosines, sines = cosines.contiguous(), sines.contiguous()
        assert into.stride(2) == 1, "the numbers of a head lie side by side"
        num_rows, num_heads, width = heads.shape
        launch: Any = programs.rotate[(num_rows,)]
        launch(
            *(heads, cosines, sines, into, heads.stride(0), heads.stride(1), cosines.stride(0)),
            *(into.stride(0), into.stride(1), -1.0 if back else 1.0),
            num_heads=num_heads,
            half=width // 2,
            head_block=triton.next_power_of_2(num_heads),
            lanes=triton.next_power_of_2(width // 2),
        )

    def activate(self, name: str, gates: Tensor, ups: Tensor | None) -> Tensor:
        """a(gates) * ups [T, F], or a(gates) without ups. `name`: one of `ACTIVATIONS` of `proximo_cpu.row_kernels`."""
        others = gates if ups is None else ups
        gates, others = (each if each.stride(1) == 1 else each.contiguous() for each in (gates, others))
        num_rows, width = gates.shape
        result = torch.empty(num_rows, width, dtype=gates.dtype, device=gates.device)
        launch: Any = programs.activate[(num_rows, triton.cdiv(width, _BLOCK))]
        strides = gates.stride(0), others.stride(0)
        launch(gates, others, result, *strides, width, name=name, gated=ups is not None, block=_BLOCK)
        return result

    def activate_backward(
        self, name: str, gates: Tensor, ups: Tensor | None, for_gates: Tensor, opened: Tensor | None
    ) -> Tensor | None:
        """Backward of `activate`, whose gradient is in `for_gates`: overwrites it with that of the gates.

        Returns the gradient of ups, if there are any. Writes a(gates) * ups to `opened`, if given.
        """
        gates, others = gates.contiguous(), gates if ups is None else ups.contiguous()
        assert for_gates.is_contiguous(), "gradients of products lie row by row"
        for_ups = None if ups is None else torch.empty_like(others)
        launch: Any = programs.activate_backward[(triton.cdiv(gates.numel(), _BLOCK),)]
        tensors = gates, others, for_gates, gates if for_ups is None else for_ups, gates if opened is None else opened
        kind = {"name": name, "gated": ups is not None, "opens": opened is not None}
        launch(*tensors, gates.numel(), **kind, block=_BLOCK)
        return for_ups

    def token_statistics(
        self, scores: Tensor, targets: Tensor, normalisers: Tensor, logprobs: Tensor, entropies: Tensor | None
    ) -> None:
        """scores z [C, V], targets [C] int64: writes log sum exp z, log p of the target and the entropy, [C] each.

        The log-prob of a target outside the vocabulary is NaN.
        """
        assert scores.is_contiguous(), "the scores of a chunk lie row by row"
        num_rows, num_tokens = scores.shape
        launch: Any = programs.token_statistics[(num_rows,)]
        results = normalisers, logprobs, logprobs if entropies is None else entropies
        kind = {"block": _WIDE_BLOCK, "wants_entropy": entropies is not None}
        launch(scores, targets.contiguous(), *results, num_tokens=num_tokens, **kind)

    def token_statistics_backward(  # noqa: PLR0917 - as that of a CPU
        self,
        scores: Tensor,
        targets: Tensor,
        normalisers: Tensor,
        entropies: Tensor,
        of_logprobs: Tensor,
        of_entropies: Tensor | None,
    ) -> None:
        """Overwrites scores [C, V] with their gradient, given those of log-probs and entropies [C]."""
        assert scores.is_contiguous(), "the scores of a chunk lie row by row"
        num_rows, num_tokens = scores.shape
        of_logprobs = of_logprobs.contiguous()
        others = of_logprobs if of_entropies is None else of_entropies.contiguous()
        launch: Any = programs.token_statistics_backward[(num_rows, triton.cdiv(num_tokens, _WIDE_BLOCK))]
        kind = {"block": _WIDE_BLOCK, "wants_entropy": of_entropies is not None}
        given = targets.contiguous(), normalisers, entropies, of_logprobs, others
        launch(scores, *given, num_tokens=num_tokens, **kind)

    def sample(
        self, logits: Tensor, *, streams: Tensor, positions: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """See `proximo.kernels.RowOperations`: by the kernel where it draws what torch's operators draw."""
        fits = draws_as(plain_draw, logits.device, logits.dtype, logits.shape[1])
        return (draw if fits else plain_draw)(logits, streams=streams, positions=positions, temperature=temperature)

    def reads_few(self, _: Tensor) -> bool:
        """False: torch's products are faster."""
        return False

    def linear(self, _rows: Tensor, _weight: Tensor, _bias: Tensor | None) -> None:
        """None: torch computes the product."""


def row_kernels_for(like: Tensor) -> RowKernels | None:
    """The row kernels, for plain float32 or bf16 on CUDA where nothing records operators; None elsewhere."""
    plain = like.is_cuda and like.dtype in (torch.float32, torch.bfloat16) and not isinstance(like, FakeTensor)
    if not plain or not torch.cuda.is_available() or _get_current_dispatch_mode() is not None:
        return None
    if like.device.index != torch.cuda.current_device():  # where Triton would launch
        return None
    return KERNELS if agree(like.device) else None


KERNELS = RowKernels()


@cache
def agree(device: torch.device) -> bool:
    """Whether the kernels compute on this device what torch's operators do. Tried once, on random numbers."""

    def why_not() -> str | None:
        with torch.inference_mode(False):  # it takes gradients, and the first call may come from a rollout
            wrong = [(error, name) for error, name in _errors(device) if not error < 1]
        found = [f"the error of {name} is {error:.2g} times what rounding explains" for error, name in wrong]
        return found[0] if found else None

    return is_right("kernels of layers are", device, why_not)


def _errors(device: torch.device) -> list[tuple[float, str]]:
    """For each kernel the largest difference to torch's operators, as a share of what rounding explains."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    found = []
    for dtype, allowed in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        rows, gradient, more, weight = (
            made(_TRIED, 72, dtype=dtype),
            made(_TRIED, 72, dtype=dtype),
            made(_TRIED, 72),
            made(72),
        )
        found += [(away / allowed, f"{name} in {dtype}") for name, away in _norms(rows, gradient, more, weight)]
        found += [(away / allowed, f"{name} in {dtype}") for name, away in _others(rows, gradient)]
    scores, of_logprobs, of_entropies = made(5, 9000).mul_(3), made(5), made(5)
    found += [(away / 1e-4, name) for name, away in _of_scores(scores, of_logprobs, of_entropies)]
    return found


def _norms(rows: Tensor, gradient: Tensor, more: Tensor, weight: Tensor) -> list[tuple[str, float]]:
    wide, factor = rows.float().clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.enable_grad():
        expected = torch.nn.functional.rms_norm(wide, (72,), factor, 1e-5)
        of_rows, of_weight = torch.autograd.grad(expected, (wide, factor), gradient.float())
    normed, inverse = KERNELS.norm(rows, weight, 1e-5)
    added, _, summed = KERNELS.add_norm(rows, gradient, weight, 1e-5, torch.bfloat16)
    sums = (rows.float() + gradient.float()).to(rows.dtype)
    again = KERNELS.norm(rows.float() + gradient.float(), weight, 1e-5, torch.bfloat16)[0]
    into = torch.empty_like(rows)
    for_weight = KERNELS.norm_backward(gradient, rows, inverse, weight, more.to(rows.dtype), into)
    return [
        ("norm", _away(normed, expected)),
        ("scale", _away(KERNELS.scale(rows, inverse, weight), expected)),
        ("add", _away(summed, sums) + 1e-3 * _away(added, again)),
        ("norm_backward", _away(into, of_rows + more.to(rows.dtype).float())),
        ("norm_backward of the weight", _away(for_weight, of_weight)),
    ]


def _others(rows: Tensor, gradient: Tensor) -> list[tuple[str, float]]:
    angles = rows[:, None, :12].float()
    cosines, sines = angles.cos(), angles.sin()
    heads = rows.view(-1, 3, 24)
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
    into = torch.empty_like(heads)
    KERNELS.rotate(heads, cosines, sines, into, back=False)
    found = [("rotate", _away(into, turned))]
    KERNELS.rotate(into, cosines, sines, into, back=True)
    found.append(("rotate back", _away(into, heads)))
    functions = {"silu": torch.nn.functional.silu, "relu": torch.relu}
    functions["gelu_tanh"] = lambda x: torch.nn.functional.gelu(x, approximate="tanh")
    for name, function in functions.items():
        gates, ups = (each.detach().float().clone().requires_grad_() for each in (rows, rows.flip(0)))
        with torch.enable_grad():
            product = function(gates) * ups
            of_gates, of_ups = torch.autograd.grad(product, (gates, ups), gradient.float())
        overwritten, opened = gradient.clone(), torch.empty_like(rows)
        for_ups = KERNELS.activate_backward(name, rows, rows.flip(0), overwritten, opened)
        assert for_ups is not None, "there are ups"
        found += [
            (name, _away(KERNELS.activate(name, rows, rows.flip(0)), product)),
            (f"{name} again", _away(opened, product)),
            (f"{name} backward to gates", _away(overwritten, of_gates)),
            (f"{name} backward to ups", _away(for_ups, of_ups)),
        ]
    return found


def _of_scores(scores: Tensor, of_logprobs: Tensor, of_entropies: Tensor) -> list[tuple[str, float]]:
    targets = torch.arange(len(scores), device=scores.device) * 1000
    scores[0, 5:] = -torch.inf
    z = scores.double().requires_grad_()
    with torch.enable_grad():
        logs = z.log_softmax(dim=1)
        logprobs, entropies = logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs.clamp_min(-1e4)).sum(dim=1)
        (expected,) = torch.autograd.grad((logprobs * of_logprobs).sum() + (entropies * of_entropies).sum(), z)
    results = [torch.empty(len(scores), device=scores.device) for _ in range(3)]
    KERNELS.token_statistics(scores, targets, *results)
    normalisers, found_logprobs, found_entropies = results
    gradient = scores.clone()
    KERNELS.token_statistics_backward(gradient, targets, normalisers, found_entropies, of_logprobs, of_entropies)
    return [
        ("token_statistics", _away(found_logprobs, logprobs)),
        ("token_statistics of entropies", _away(found_entropies, entropies)),
        ("token_statistics_backward", _away(gradient, expected)),
    ]


def _away(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    found, expected = found.detach().double(), expected.detach().double()
    return ((found - expected).abs().max() / expected.abs().max()).item()
