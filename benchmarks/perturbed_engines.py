"""Engines that sample from another distribution than the learner's, and say so: each log-prob is that of the
distribution from which the token was drawn, as vLLM in another precision reports its own."""

import copy
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from proximo.models.heads import OutputHead
from proximo.models.language import LanguageModel
from proximo.models.precision.placement import Precision
from proximo.rollout.local import LocalEngine

Shift = Callable[[Tensor], Tensor]
"""Logits [..., V] of the policy -> those that are sampled from."""


def prefers(token_id: int, by: float) -> Shift:
    """The logit of one token is too high by `by`."""

    def shift(logits: Tensor) -> Tensor:
        chosen = torch.zeros(logits.shape[-1]).index_fill_(0, torch.tensor([token_id]), by)
        return logits + chosen

    return shift


def slips(share: float) -> Shift:
    """So many of the tokens are drawn from the whole vocabulary with equal probability."""

    def shift(logits: Tensor) -> Tensor:
        kept = logits.log_softmax(-1) + math.log1p(-share)
        return torch.logaddexp(kept, torch.tensor(math.log(share / logits.shape[-1])))

    return shift


class ShiftedEngine(LocalEngine):
    """The built-in engine on the learner's own weights, with logits that are shifted."""

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, shift: Shift, *, eos_token_ids: Collection[int]
    ) -> None:
        """`model`: the transformers model of the policy."""
        super().__init__(_ShiftedModel(model, shift), tokenizer, eos_token_ids=eos_token_ids)

    @property
    def logprobs_are_the_learners(self) -> bool:
        return False


def bf16_engine(model: Any, tokenizer: PreTrainedTokenizerBase, *, eos_token_ids: Collection[int]) -> LocalEngine:
    """The built-in engine on a copy of its own, which it casts to bf16 for every rollout."""
    own = LanguageModel(copy.deepcopy(model), precision=Precision.BF16)
    return LocalEngine(own, tokenizer, eos_token_ids=eos_token_ids)


class _ShiftedModel(LanguageModel):
    def __init__(self, model: Any, shift: Shift) -> None:
        super().__init__(model)
        self.shift = shift

    @property
    def head(self) -> OutputHead:
        own = super().head
        return _ShiftedHead(**{each.name: getattr(own, each.name) for each in fields(own)}, shift=self.shift)


@dataclass(frozen=True, kw_only=True)
class _ShiftedHead(OutputHead):
    shift: Shift

    def logits(self, hidden: Tensor) -> Tensor:
        return self.shift(super().logits(hidden))
