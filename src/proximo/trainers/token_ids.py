"""Token ids, masks and scores as callers bring them (lists, tensors, arrays) made plain. Knows no record."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proximo.errors import DataError
from proximo.rewards.dense import is_list

TokenIds = Sequence[int] | Tensor
"""The ids of one sequence, without padding."""
Mask = Sequence[bool] | Sequence[int] | Tensor
"""True (or 1) for each token that the policy wrote."""


def is_token_ids(given: Any) -> bool:
    """Whether this is one sequence of whole numbers, of whatever kind."""
    listed = plain(given)
    return is_list(listed) and all(type(token) is int for token in listed)


def plain(given: Any) -> Any:
    """Tensors and arrays as Python's lists and numbers, on the CPU; anything else as it is."""
    return given.tolist() if isinstance(given, Tensor | np.ndarray) else given


def check_range(token_ids: Sequence[int], *, num_tokens: int, what: str) -> None:
    """Raises DataError for an id that the policy has no embedding for."""
    beyond = [token for token in token_ids if not 0 <= token < num_tokens]
    if beyond:
        raise DataError(f"a {what} has the token id {beyond[0]}, but the policy has {num_tokens} tokens")


def as_mask(given: Mask, *, num_tokens: int, index: int) -> Tensor:
    """[T] bool. Raises DataError where there is not one True or False (1 or 0) for each of the response's tokens."""
    listed = plain(given)
    if not is_list(listed) or len(listed) != num_tokens or not set(listed) <= {0, 1}:
        raise DataError(
            f"response_masks has one True or False for each token of a response; response {index} has {num_tokens} "
            f"tokens, its mask is {listed!r:.60}: leave the prompt and padding out"
        )
    return torch.tensor(listed, dtype=torch.bool)


def as_score(given: Any) -> float:
    """A number; NaN for None. Raises DataError for what is neither, such as a tensor of several numbers."""
    listed = plain(given)
    if is_list(listed) and len(listed) == 1:
        (listed,) = listed
    if listed is None:
        return math.nan
    if not isinstance(listed, int | float):
        raise DataError(f"a score is one number for a response, or None, got {listed!r:.60}")
    return float(listed)
