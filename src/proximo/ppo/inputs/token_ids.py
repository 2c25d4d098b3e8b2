"""Token ids, masks and scores as callers bring them (lists, tensors, arrays) made plain. Knows no record."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proximo.errors import DataError
from proximo.rewards.dense import as_number, is_list

TokenIds = Sequence[int] | Tensor
"""The ids of one sequence, without padding."""
Mask = Sequence[bool] | Sequence[int] | Tensor
"""True (or 1) for each token that the policy wrote."""


def is_token_ids(given: Any) -> bool:
    """Whether this is one sequence of whole numbers, of whatever kind."""
    listed = plain(given)
    return is_list(listed) and all(type(token) is int for token in listed)


def plain(given: Any) -> Any:
    """Tensors, arrays and their numbers as Python's lists and numbers, on the CPU; anything else as it is."""
    if isinstance(given, Tensor | np.ndarray | np.generic):
        return given.tolist()
    if is_list(given) and any(isinstance(each, np.generic) or _is_number(each) for each in given):
        return [each.tolist() if isinstance(each, np.generic) or _is_number(each) else each for each in given]
    return given


def _is_number(given: Any) -> bool:
    return isinstance(given, Tensor | np.ndarray) and given.ndim == 0


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
    if is_list(listed):
        raise DataError(f"a score is one number for a response, or None, got {listed!r:.60}")
    try:
        return as_number(listed)
    except (TypeError, ValueError) as error:
        raise DataError(f"a score is one number for a response, or None, got {listed!r:.60}") from error
