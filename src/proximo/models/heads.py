"""Log-probs, entropy and KL from hidden states, in chunks of positions, so that not all logits exist at once.

The backward pass recomputes each chunk's logits. Results are at least float32, also inside autocast. So are the
operands of products, unless the head is narrow (products.py).

Legend: N positions, C positions of one chunk, D width, V vocabulary. z: final logits before
the temperature. In a backward pass, `for_x` is the gradient of x.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from proximo.algorithms import kl
from proximo.errors import ModelError
from proximo.kernels import row_operations
from proximo.models.packing import send
from proximo.models.precision.compute import keep_casts_in_recomputation
from proximo.models.precision.products import (
    add_product,
    gradient_product,
    has_kernels_for_all,
    linear,
    narrow_linear,
    operand,
    product,
    weight_operand,
)
from proximo.records import SamplingMask

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel

_NO_SHARE = -1e4
"""Log-probs are clamped to this value: its exp is 0, so p log p is 0. With -inf it would be NaN."""

MAX_SPARE_ROWS = 0.01
"""Rows that the output layer of a reference may have beyond the policy's, as a share of these: models of one family may
pad their layers to different sizes, with rows of no token."""

CHUNK_TOKENS = 256
"""Positions per chunk on a CPU, and the minimum on other devices. On a CPU this was within 5% of the fastest size for
vocabularies of 2 thousand to 150 thousand tokens."""


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """The last layer of a language model: z(h) = cap(logit_scale * (W h + b)), cap(x) = softcap * tanh(x / softcap)."""

    weight: Float[Tensor, "vocab hidden"]
    """The input embedding itself if the two are tied."""
    bias: Float[Tensor, "vocab"] | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    narrow: bool = False
    """True: products of bf16 operands with float32 results. float64 weights are not narrowed."""
    chunk_tokens: int = CHUNK_TOKENS
    """Positions per chunk: their logits exist at the same time."""

    @classmethod
    def of(cls, model: "PreTrainedModel", *, narrow: bool = False, logits_bytes: int | None = None) -> "OutputHead":
        """The head of a causal language model. Raises ModelError if it is not a plain linear layer.

        `logits_bytes`: memory for the float32 logits of one chunk; None for `CHUNK_TOKENS` positions.
        """
        layer = model.get_output_embeddings()
        if type(layer) is not nn.Linear:
            raise ModelError(
                f"the output layer of {type(model).__name__} must be a linear layer without adapter, "
                f"but it is {type(layer).__name__}"
            )
        options = model.config.get_text_config().to_dict()
        multiplier = options.get("logit_scale") or 1.0  # Cohere
        divisor = options.get("logits_scaling") or 1.0  # Granite
        return cls(
            weight=layer.weight,
            bias=layer.bias,
            logit_scale=multiplier / divisor,
            softcap=options.get("final_logit_softcapping"),  # Gemma
            narrow=narrow,
            chunk_tokens=max(CHUNK_TOKENS, (logits_bytes or 0) // (4 * layer.weight.shape[0])),
        )

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        """hidden [..., D] -> [..., V] in at least float32. For few positions only."""
        wide = wide_dtype(hidden, self.weight)
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(wide)
            if self.narrow and wide is torch.float32:
                return self._finish(narrow_linear(hidden.to(wide), self.weight, bias))
            return self._finish(linear(hidden.to(wide), self.weight.to(wide), bias))

    def _finish(self, raw: Tensor) -> Tensor:
        """W h + b -> z, before the temperature."""
        scaled = raw if self.logit_scale == 1 else raw * self.logit_scale
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probs of the target tokens, and the entropy at their positions."""

    logprobs: Float[Tensor, "positions"]
    """log softmax(z / temperature) of the target, over the tokens of the sampling mask if there is one."""
    entropy: Float[Tensor, "positions"] | None
    """Entropy of that softmax in nats; None if not requested."""


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """The result type of float32 and the tensors' dtypes: at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def token_logprobs(
    hidden: Float[Tensor, "positions hidden"],
    head: OutputHead,
    targets: Int64[Tensor, "positions"],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    sampling_mask: SamplingMask | None = None,
    chunk_tokens: int | None = None,
) -> TokenLogprobs:
    """hidden [N, D], targets [N] int64 -> log-probs [N] and, if requested, entropy [N]; differentiable once.

    Gradients reach `hidden`, the head's weight and its bias. `sampling_mask`: of N draws; the softmax is then over its
    tokens, on the device of `hidden`. `chunk_tokens`: None for `head.chunk_tokens`.
    """
    wide = wide_dtype(hidden, head.weight)
    plan = _Plan(
        logit_scale=head.logit_scale,
        softcap=head.softcap,
        temperature=temperature,
        entropy=entropy,
        chunk_tokens=chunk_tokens or head.chunk_tokens,
        narrow=head.narrow and wide is torch.float32,
        sampling_mask=sampling_mask,
    )
    with torch.autocast(hidden.device.type, enabled=False):
        bias = None if head.bias is None else head.bias.to(wide)
        weight = head.weight if plan.narrow else head.weight.to(wide)
        multiplied = weight_operand(weight) if plan.narrow else weight.detach()
        logprobs, entropies = _FusedHead.apply(hidden.to(wide), weight, bias, targets, plan, multiplied)
    return TokenLogprobs(logprobs=logprobs, entropy=entropies if entropy else None)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Options of the fused function, besides its tensors."""

    logit_scale: float
    softcap: float | None
    temperature: float
    entropy: bool
    chunk_tokens: int
    narrow: bool
    sampling_mask: SamplingMask | None

    def chunks(self, num_positions: int) -> Iterator[slice]:
        for start in range(0, num_positions, self.chunk_tokens):
            yield slice(start, min(start + self.chunk_tokens, num_positions))

    def operand(self, tensor: Tensor) -> Tensor:
        """A tensor as an operand of a product: rounded to bf16 if the head is narrow."""
        return operand(tensor) if self.narrow else tensor

    def scores(self, raw: Tensor) -> Tensor:
        """raw = W h + b [C, V] -> z / temperature [C, V]. Overwrites `raw`."""
        if self.logit_scale != 1:
            raw.mul_(self.logit_scale)
        if self.softcap is not None:
            raw.div_(self.softcap).tanh_().mul_(self.softcap)
        return raw if self.temperature == 1 else raw.div_(self.temperature)

    def restrict(self, scores: Tensor, rows: slice) -> Tensor:
        """z / temperature [C, V], -inf for tokens that the draws of these rows left out. Overwrites `scores`."""
        if self.sampling_mask is None:
            return scores
        drawn = self.sampling_mask.part(rows.start, rows.stop)
        ids, counts = drawn.token_ids.long(), send(drawn.counts, scores.device)
        row_of_id = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=len(ids))
        kept = scores[row_of_id, ids]
        scores.masked_fill_((counts > 0)[:, None], -torch.inf)
        return scores.index_put_((row_of_id, ids), kept)

    def raw_gradient(self, gradient: Tensor, scores: Tensor) -> Tensor:
        """Gradient [C, V] of z / temperature -> gradient [C, V] of W h + b. Overwrites `gradient`."""
        if self.softcap is not None:
            gradient.mul_(1 - (scores * (self.temperature / self.softcap)).square())
        factor = self.logit_scale / self.temperature
        return gradient if factor == 1 else gradient.mul_(factor)


class _FusedHead(torch.autograd.Function):
    """log p_t = z_t - lse(z) and H = -sum_j p_j log p_j, with d log p_t / dz_j = [j = t] - p_j and
    dH / dz_j = -p_j (log p_j + H)."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any,
        hidden: Tensor,
        _weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        plan: _Plan,
        multiplied: Tensor,
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(hidden.shape[0])
        normalisers = torch.empty_like(logprobs)
        entropies = torch.zeros_like(logprobs)
        hidden = plan.operand(hidden)
        for rows in plan.chunks(hidden.shape[0]):
            scores = plan.restrict(plan.scores(_product(hidden[rows], multiplied, bias)), rows)
            entropy = entropies[rows] if plan.entropy else None
            _statistics(scores, targets[rows], normalisers[rows], logprobs[rows], entropy)
        ctx.plan = plan
        ctx.save_for_backward(hidden, multiplied, bias, targets, normalisers, entropies)
        if not plan.entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalisers, entropies = ctx.saved_tensors
        plan: _Plan = ctx.plan
        for_hidden = torch.empty_like(hidden, dtype=normalisers.dtype) if ctx.needs_input_grad[0] else None
        for_weight = torch.zeros_like(weight, dtype=normalisers.dtype) if ctx.needs_input_grad[1] else None
        for_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for rows in plan.chunks(hidden.shape[0]):
            scores = plan.scores(_product(hidden[rows], weight, bias))
            # The derivative of the soft-cap needs the scores, which the next line overwrites.
            capped = scores.clone() if plan.softcap is not None else scores
            plan.restrict(scores, rows)
            chunk_gradients = gradients[0][rows], gradients[1][rows] if plan.entropy else None
            gradient = _score_gradient(scores, targets[rows], normalisers[rows], entropies[rows], *chunk_gradients)
            gradient = plan.raw_gradient(gradient, capped)
            if for_bias is not None:
                for_bias.add_(gradient.sum(dim=0))
            gradient = plan.operand(gradient)
            # Of chunks of one size alone, because a product in bf16 is compiled for each number of rows on a CPU.
            is_whole = plan.narrow and len(gradient) == plan.chunk_tokens and not has_kernels_for_all(gradient)
            multiply = gradient_product if is_whole else product
            if for_hidden is not None:
                for_hidden[rows] = multiply(gradient, weight)
            if for_weight is not None and multiply is gradient_product:
                for_weight.add_(multiply(gradient.t(), hidden[rows]))
            elif for_weight is not None:
                for_weight = add_product(for_weight, gradient.t(), hidden[rows])
        return for_hidden, for_weight, for_bias, None, None, None


def _product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if hidden.dtype is torch.bfloat16:
        raw = product(hidden, weight.t())
        return raw if bias is None else raw.add_(bias)
    return hidden @ weight.t() if bias is None else torch.addmm(bias, hidden, weight.t())


def _statistics(
    scores: Tensor, targets: Tensor, normalisers: Tensor, logprobs: Tensor, entropies: Tensor | None
) -> None:
    """From scores [C, V] and targets [C], fill normalisers, logprobs and, if given, entropies, [C] each.

    Overwrites scores.
    """
    if (kernels := row_operations(scores)) is not None:
        kernels.token_statistics(scores, targets, normalisers, logprobs, entropies)
        return
    normalisers.copy_(scores.logsumexp(dim=-1))
    logprobs.copy_(scores.gather(1, targets[:, None])[:, 0] - normalisers)
    if entropies is not None:
        log_shares = scores.sub_(normalisers[:, None]).clamp_(min=_NO_SHARE)
        entropies.copy_((log_shares.exp() * log_shares).sum(dim=-1).neg_())


def _score_gradient(  # noqa: PLR0917 - six tensors of one chunk
    scores: Tensor,
    targets: Tensor,
    normalisers: Tensor,
    entropies: Tensor,
    of_logprobs: Tensor,
    of_entropy: Tensor | None,
) -> Tensor:
    """[j = t] g - g p - g' p (log p + H), [C, V]: the gradient of z / temperature. Overwrites scores.

    g [C] is the gradient of the log-probs, g' [C] that of the entropies.
    """
    if (kernels := row_operations(scores)) is not None:
        kernels.token_statistics_backward(scores, targets, normalisers, entropies, of_logprobs, of_entropy)
        return scores
    if of_entropy is None:
        gradient = scores.sub_(normalisers[:, None]).exp_().mul_(-of_logprobs[:, None])
    else:
        log_shares = (scores - normalisers[:, None]).clamp_(min=_NO_SHARE)
        shares = log_shares.exp()
        gradient = (
            log_shares.add_(entropies[:, None]).mul_(-of_entropy[:, None]).sub_(of_logprobs[:, None]).mul_(shares)
        )
    return gradient.scatter_add_(1, targets[:, None], of_logprobs[:, None])


def check_same_rows(num_rows: int, num_reference_rows: int) -> None:
    """Raises ModelError if the output layers of policy and reference cannot have one vocabulary."""
    if not 0 <= num_reference_rows - num_rows <= MAX_SPARE_ROWS * num_rows:
        raise ModelError(
            f"the reference gives logits for {num_reference_rows} tokens, the policy for {num_rows}: the KL compares "
            "the same tokens; bring a reference with the policy's vocabulary"
        )


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """How far the policy is from the reference at each position."""

    kl: Float[Tensor, "positions"]
    """KL(policy || reference) over the whole vocabulary, in nats."""
    same_top: Bool[Tensor, "positions"]
    """Whether the most likely token of the two is the same."""


def full_divergence(
    hidden: Float[Tensor, "positions hidden"],
    head: OutputHead,
    reference_hidden: Float[Tensor, "positions reference_hidden"],
    reference_head: OutputHead,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
) -> Divergence:
    """The policy against the reference over the whole vocabulary: [N, D] twice -> [N] each.

    The formula of the KL is that of `algorithms.kl.full_kl`, in chunks. Gradients reach the policy's hidden states and
    head, not the reference. Rows that the reference has beyond the policy's are left out
    (`check_same_rows`). Raises ModelError if the two are on different devices or have different vocabularies.
    """
    if hidden.device != reference_hidden.device:
        raise ModelError(
            f"the full KL needs policy and reference on one device, not on {hidden.device} and "
            f"{reference_hidden.device}; use a sampled estimator (k1) instead"
        )
    shared = head.weight.shape[0]
    check_same_rows(shared, reference_head.weight.shape[0])

    def of_chunk(rows: Tensor, reference_rows: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            reference = reference_head.logits(reference_rows)[:, :shared] / temperature
        logits = head.logits(rows) / temperature
        return kl.full_kl(logits, reference), logits.argmax(-1) == reference.argmax(-1)

    size = chunk_tokens or head.chunk_tokens
    pieces = zip(hidden.split(size), reference_hidden.split(size), strict=True)
    options: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": False,
        "context_fn": keep_casts_in_recomputation,
    }
    parts = [checkpoint(of_chunk, mine, other, **options) for mine, other in pieces]
    divergences, same_top = (torch.cat(part) for part in zip(*parts, strict=True))
    return Divergence(kl=divergences, same_top=same_top)
