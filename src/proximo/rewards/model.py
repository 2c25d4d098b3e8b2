"""Scores from a reward model: the value of its head at the last token of the response."""

import math
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from proximo.data.rendering import render_for
from proximo.data.tokenise import Encoder
from proximo.models.batching import plan_batches
from proximo.models.packing import pack
from proximo.models.scalar import ScalarModel
from proximo.records import Response, Scored, ScoreState


class ModelReward:
    """Reads the policy's token ids, or renders text and messages again where the model has its own tokenizer.

    `tokenizer` is that of the reward model where it differs from the policy's, else None. Ids never cross from one
    tokenizer to another.
    """

    def __init__(
        self,
        model: ScalarModel,
        *,
        name: str = "reward_model",
        tokenizer: PreTrainedTokenizerBase | None = None,
        tokens_per_microbatch: int = 8192,
    ) -> None:
        self.name = name
        self.model = model
        self.encoder = None if tokenizer is None else Encoder(tokenizer)
        self.tokens_per_microbatch = tokens_per_microbatch

    @torch.no_grad()
    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """One score per response, the same in whatever company it is scored.

        A response that is too long for a model with its own tokenizer, or whose score is no number, is a fault.
        """
        sequences = [self._token_ids(response) for response in responses]
        lengths = [len(sequence) for sequence in sequences]
        limit = self.model.position_limit
        # The policy's own ids were measured before training: here too many of them are a mistake of the caller.
        readable = [i for i, length in enumerate(lengths) if self.encoder is None or limit is None or length <= limit]
        scores: list[float | None] = [None] * len(sequences)
        for batch in plan_batches([lengths[i] for i in readable], token_budget=self.tokens_per_microbatch):
            packed = pack([sequences[readable[i]] for i in batch], device=self.model.device)
            for index, score in zip(batch, self.model.sequence_scores(packed).tolist(), strict=True):
                scores[readable[index]] = score
        return [self._scored(*found) for found in zip(responses, scores, lengths, strict=True)]

    def _scored(self, response: Response, score: float | None, length: int) -> Scored:
        if score is not None and math.isfinite(score):
            return Scored(response=response, score=score)
        reason = f"{self.name} gave {score}"
        if score is None:
            reason = f"{self.name} reads at most {self.model.position_limit} of its tokens, the response makes {length}"
        return Scored(response=response, score=math.nan, state=ScoreState.INFRASTRUCTURE_FAULT, reason=reason)

    def _token_ids(self, response: Response) -> tuple[int, ...]:
        if self.encoder is None:
            return (*response.prompt.token_ids, *response.token_ids)
        finished = response.finish.terminated
        prompt_ids, response_ids = render_for(self.encoder, response.prompt, response.text, finished=finished)
        return (*prompt_ids, *response_ids)
