"""Converts token ids, masks and scores from lists, tensors and arrays to plain Python values."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proximo.errors import DataError
from proximo.rewards.token_rewards import as_number, is_list

TokenIds = Sequence[int] | Tensor
"""The ids of one sequence, without padding."""
Mask = Sequence[bool] | Sequence[int] | Tensor
"""True (or 1) for each token that the policy wrote."""


def is_token_ids(given: Any) -> bool:
    """Whether the value is one sequence of integers, of any type."""
    listed = plain(given)
    return is_list(listed) and all(type(token) is int for token in listed)


def plain(given: Any) -> Any:
    """Tensors, arrays and their scalars as Python lists and numbers; anything else unchanged."""
    if isinstance(given, Tensor | np.ndarray | np.generic):
        return given.tolist()
    if is_list(given) and any(isinstance(item, np.generic) or _is_number(item) for item in given):
        return [item.tolist() if isinstance(item, np.generic) or _is_number(item) else item for item in given]
    return given


def _is_number(given: Any) -> bool:
    return isinstance(given, Tensor | np.ndarray) and given.ndim == 0


def check_range(token_ids: Sequence[int], *, num_tokens: int, what: str) -> None:
    """Raises DataError for a token id that is not in the policy's vocabulary."""
    beyond = [token for token in token_ids if not 0 <= token < num_tokens]
    if beyond:
        raise DataError(f"a {what} has the token id {beyond[0]}, but the policy has {num_tokens} tokens")


def as_mask(given: Mask, *, num_tokens: int, index: int) -> Tensor:
    """A mask as [T] bool. Raises DataError if it does not have one True or False (1 or 0) per token of the response."""
    listed = plain(given)
    if not is_list(listed) or len(listed) != num_tokens or not set(listed) <= {0, 1}:
        raise DataError(
            f"response_masks has one True or False for each token of a response; response {index} has {num_tokens} "
            f"tokens, its mask is {listed!r:.60}: leave the prompt and padding out"
        )
    return torch.tensor(listed, dtype=torch.bool)


def as_score(given: Any) -> float:
    """A score as a float; NaN for None. Raises DataError for anything else, such as a tensor of several numbers."""
    listed = plain(given)
    if is_list(listed) and len(listed) == 1:
        (listed,) = listed
    if is_list(listed):
        raise DataError(f"a score is one number for a response, or None, got {listed!r:.60}")
    try:
        return as_number(listed)
    except (TypeError, ValueError) as error:
        raise DataError(f"a score is one number for a response, or None, got {listed!r:.60}") from error
