"""The load-balancing loss of a mixture of experts: what a model asks for, and what its routers did in a pass.

With E experts, of which a router sends each token to k, over all tokens and layers with a router of an update:

    loss = E sum_e f_e P_e

f_e is the share of tokens that e was among the k most probable experts of, and P_e the mean probability of e
(arXiv:2101.03961, eqs. 4 to 6; `load_balancing_loss_func` of transformers). It is k where all experts get alike.

f has no gradient, so once it is known the loss is a sum over tokens. It is that of the whole update
(arXiv:2501.11873), so that no gradient depends on micro-batches or ranks.

Legend: T packed tokens, E experts, k experts of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from proximo.errors import ModelError

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Names of the coefficient in configurations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Balancing:
    """How a model is to be balanced."""

    coefficient: float
    """Of the loss, above 0."""
    experts_per_token: int
    """k."""


def balancing_of(config: "PreTrainedConfig", coefficient: float | None = None) -> Balancing | None:
    """What the configuration of a model asks for, or what `coefficient` does in its place, where 0 is none.

    A configuration asks with `output_router_logits`, as the losses of transformers read it. Raises ModelError for a
    coefficient of a model that has no such loss.
    """
    text = config.get_text_config()
    nested = getattr(text, "ffn_config", None)  # DBRX
    known = [getattr(text, name) for name in _COEFFICIENTS if getattr(text, name, None) is not None]
    known += [nested.moe_loss_weight] if hasattr(nested, "moe_loss_weight") else []
    if not known:
        if coefficient:
            raise ModelError(
                f"balancing_coefficient is {coefficient:g}, but a {text.model_type} model has no loss that balances "
                "experts: leave it out"
            )
        return None
    if coefficient is None:
        coefficient = float(known[0]) if getattr(text, "output_router_logits", False) else 0.0
    per_token = nested.moe_top_k if hasattr(nested, "moe_top_k") else text.num_experts_per_tok
    return Balancing(coefficient=coefficient, experts_per_token=per_token) if coefficient else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLoad:
    """What the routers of all layers did with some tokens. Loads of several passes add up."""

    counts: Int64[Tensor, "experts"]
    """[E] how often each expert was among the k of a token. Without gradient."""
    probabilities: Float[Tensor, "experts"]
    """[E] sum over the tokens of each expert's probability, in at least float32."""
    num_decisions: Int64[Tensor, ""]
    """Tokens, times layers with a router."""

    def __add__(self, other: "ExpertLoad") -> "ExpertLoad":
        return ExpertLoad(
            counts=self.counts + other.counts,
            probabilities=self.probabilities + other.probabilities,
            num_decisions=self.num_decisions + other.num_decisions,
        )


def expert_load(
    router_logits: Sequence[Tensor] | None, token_counts: Int64[Tensor, "tokens"], *, experts_per_token: int
) -> ExpertLoad:
    """The load of one pass. `router_logits`: of each layer with a router, [T, E].

    `token_counts`: how often each token counts: in as many sequences as it is part of, 0 for one that fills a place.
    Raises ModelError if the model gave no router logits, or others than one for each token and expert.
    """
    if not router_logits:
        raise ModelError("the model has a loss that balances its experts, but gives no router logits")
    num_tokens, weights = len(token_counts), token_counts
    counts, sums = torch.zeros(router_logits[0].shape[-1], dtype=torch.int64, device=weights.device), []
    for logits in router_logits:
        if logits.dim() != 2 or len(logits) != num_tokens or logits.shape[1] != len(counts):
            raise ModelError(
                f"to balance its experts the router logits of a model must be [{num_tokens} tokens, experts], and they "
                f"are {list(logits.shape)}: set balancing_coefficient to 0"
            )
        probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=-1)
        chosen = probabilities.detach().topk(experts_per_token, dim=-1).indices
        counts.index_add_(0, chosen.flatten(), weights.repeat_interleave(experts_per_token))
        sums.append(weights.to(probabilities.dtype) @ probabilities)
    return ExpertLoad(
        counts=counts,
        probabilities=torch.stack(sums).sum(dim=0),
        num_decisions=weights.sum() * len(router_logits),
    )


def balancing_loss(
    probabilities: Float[Tensor, "experts"], counts: Int64[Tensor, "experts"], *, num_decisions: Int64[Tensor, ""]
) -> Float[Tensor, ""]:
    """The share that some tokens have in the loss of an update; k if they are all of it and balanced.

    `probabilities`: of these tokens, as in `ExpertLoad`. `counts` and `num_decisions`: of the whole update.
    """
    shares = counts.to(probabilities.dtype) / num_decisions
    return len(counts) * (shares * probabilities).sum() / num_decisions
