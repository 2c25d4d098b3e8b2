"""Reads from a model's configuration whether and how its experts are balanced."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proximo.errors import ModelError

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Names of the coefficient in configurations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Balancing:
    """How a model is balanced."""

    coefficient: float
    """Of the loss, above 0."""
    experts_per_token: int
    """k."""


def balancing_of(config: "PreTrainedConfig", coefficient: float | None = None) -> Balancing | None:
    """The balancing of a model's configuration, or with `coefficient` in its place; 0 means none.

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
