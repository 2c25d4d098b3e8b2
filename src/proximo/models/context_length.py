"""The context length of models."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from proximo.errors import ConfigError

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""RoPE types whose frequencies depend on the longest sequence of a pass, so packed sequences would affect each
other."""


def position_limit(config: "PreTrainedConfig") -> int | None:
    """Tokens that one sequence may have; None for a model without a stated limit.

    For RoPE types in `LENGTH_DEPENDENT_ROPE`, the limit is the length up to which their frequencies are constant.
    """
    text = config.get_text_config().to_dict()
    stated = text.get("max_position_embeddings") or text.get("n_positions") or text.get("max_seq_len")
    limits = [stated] if stated else []
    for rope in _rope_settings(text.get("rope_parameters")):
        if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            limits.append(rope.get("original_max_position_embeddings") or stated)
    return min((limit for limit in limits if limit), default=None)


def check_lengths(
    config: "PreTrainedConfig", *, role: str, max_prompt_tokens: int, max_response_tokens: int, section: str = "data"
) -> None:
    """Raises ConfigError if prompt and response together can exceed the context length of the role's model.

    Without responses (`max_response_tokens` 0) the prompts are whole examples of the recipe's `section`.
    """
    limit = position_limit(config)
    total = max_prompt_tokens + max_response_tokens
    if limit is None or total <= limit:
        return
    kinds = {
        rope.get("rope_type") for rope in _rope_settings(config.get_text_config().to_dict().get("rope_parameters"))
    }
    scheme = kinds & set(LENGTH_DEPENDENT_ROPE)
    reason = f" (beyond it, its {scheme.pop()} rotary positions depend on the longest sequence)" if scheme else ""
    reads = f"but the {role} model ({config.model_type}) reads at most {limit} positions{reason}"
    if not max_response_tokens:
        raise ConfigError(f"there are examples of up to {total} tokens, {reads}; lower {section}.max_tokens")
    raise ConfigError(
        f"a prompt of up to {max_prompt_tokens} tokens and a response of up to {max_response_tokens} make {total}, "
        f"{reads}; lower data.max_prompt_tokens or ppo.rollout.max_new_tokens"
    )


def _rope_settings(parameters: Any) -> Iterator[dict[str, Any]]:
    """The RoPE settings of a config. Some models have one, others one per type of layer."""
    if not isinstance(parameters, dict):
        return
    if "rope_type" in parameters:
        yield parameters
    for nested in parameters.values():
        yield from _rope_settings(nested)
