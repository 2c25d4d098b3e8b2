"""The reward source of a reward model: the output of its head at the last token of a response, or at each token."""

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from proximo.data.rendering import render_for
from proximo.data.templates.renderer import RenderingError, TemplateLimitError
from proximo.data.tokenise import TextEncoder
from proximo.distributed.world import current
from proximo.errors import ConfigError
from proximo.metrics.values import MetricValue
from proximo.models.batching import plan_shares
from proximo.models.packing import Packed, pack, send, shareable_prefixes
from proximo.models.precision.compute import casting
from proximo.models.pretrained.vocabulary import check_vocabulary
from proximo.models.scalar import ScalarModel
from proximo.records import Response, Scored, ScoreState
from proximo.rewards.dense import scored_by_prefix, scored_by_token
from proximo.rewards.statistics import BatchStatistics

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

Dense = Literal["none", "deltas", "absolute"]
"""Per-token rewards: none, the change that a token makes to the score, or the score up to the token."""


Parts = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of a response to it."""


class ModelReward:
    """Scores responses with a reward model.

    `tokenizer` is the reward model's if it differs from the policy's, else None. Without it the model reads the
    policy's token ids; with it prompts and responses are rendered again, so ids never cross between tokenizers.
    Responses to one prompt share its computation.
    On several ranks each computes a share of the scores.
    """

    on_all_ranks = True

    def __init__(
        self,
        model: ScalarModel,
        *,
        name: str = "reward_model",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        tokens_per_microbatch: int = 8192,
        dense: Dense = "none",
    ) -> None:
        """Raises ConfigError for per-token rewards of a model with its own tokenizer, ModelError for a tokenizer that
        is larger than the embedding of the model."""
        if not isinstance(model, ScalarModel):
            raise ConfigError(
                f"ModelReward needs a ScalarModel, got {type(model).__name__}: write ModelReward(ScalarModel(model)) "
                "with a sequence classifier of transformers that has one label"
            )
        if dense != "none" and tokenizer is not None:
            raise ConfigError(
                f"the reward model {name!r} has a tokenizer of its own, so its scores after each token are not those "
                f"of the policy's tokens: set dense: none instead of {dense}, or train one with the policy's tokenizer"
            )
        if tokenizer is not None:
            check_vocabulary(model.base, tokenizer, role="reward")
        self.name = name
        self.model = model
        self.encoder = None if tokenizer is None else TextEncoder(tokenizer)
        self.tokens_per_microbatch = tokens_per_microbatch
        self.dense = dense
        self._statistics = BatchStatistics()

    @torch.no_grad()
    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """One score per response, independent of the other responses in the batch.

        A response has no score if it is too long for a model with its own tokenizer, if the model's chat template
        refuses it, or if its score is not finite.
        """
        start = time.monotonic()
        parts, refusals = self._token_ids(responses)
        lengths = [len(prompt) + len(response) for prompt, response in parts]
        limit = self.model.position_limit
        # Lengths in the policy's tokens are checked before training, so only re-rendered sequences can be too long.
        readable = [
            i
            for i, length in enumerate(lengths)
            if i not in refusals and (self.encoder is None or limit is None or length <= limit)
        ]
        known = self._scores_of([parts[i] for i in readable])
        scores = [list[float]() for _ in parts]
        for i, sequence_scores in zip(readable, known, strict=True):
            scores[i] = sequence_scores
        scored = [
            self._scored(response, scores[i], refusals.get(i) or self._too_long(lengths[i]))
            for i, response in enumerate(responses)
        ]
        if current().leads:
            self._statistics.count(scored, time.monotonic() - start)
        return scored

    def statistics(self) -> dict[str, MetricValue]:
        """The metrics of this source since the last call. Its seconds are those of whole batches."""
        return self._statistics.taken(self.name)

    def _scores_of(self, parts: Sequence[Parts]) -> list[list[float]]:
        """For each prompt with its response the score at its last token.

        With `dense`, the scores at the last prompt token and at all response tokens, or at all tokens without a prompt.
        """
        world = current()
        prefixes = shareable_prefixes([prompt for prompt, _ in parts])
        plans = plan_shares(
            [len(prompt) + len(response) for prompt, response in parts],
            token_budget=self.tokens_per_microbatch,
            num_ranks=world.size,
            prefixes=prefixes,
        )
        own = [
            len(prompt) + len(response) - len(prefix)
            for (prompt, response), prefix in zip(parts, prefixes, strict=True)
        ]
        results = []
        with casting(), self.model.backbone.at_work():
            for batch in plans[world.rank]:
                # A rank without a batch takes a pass over one token, since the ranks meet in every pass.
                packed = pack(
                    [(*parts[i][0], *parts[i][1]) for i in batch] or [(0,)],
                    shareable=[len(prefixes[i]) for i in batch],
                    device=self.model.device,
                )
                scores = self.model.backbone.run_pass(partial(self._scores, packed, [own[i] for i in batch]))
                results.append(scores if batch else scores[:0])
        if not results:
            return []
        rows = world.gather_rows(torch.cat(results), what=f"scores of {self.name}")
        order = [index for plan in plans for batch in plan for index in batch]
        sizes = [1 if self.dense == "none" else own[index] for index in order]
        pieces = dict(zip(order, rows.split(sizes), strict=True))
        return [pieces[index].tolist() for index in range(len(parts))]

    def _scores(self, packed: Packed, own: Sequence[int]) -> Tensor:
        """The scores at the last tokens of sequences, or with `dense` at the last `own` tokens of each."""
        if self.dense == "none":
            return self.model.sequence_scores(packed)
        ends = (packed.last_indices + 1).tolist()
        rows = [torch.arange(end - count, end) for end, count in zip(ends, own or [1], strict=True)]
        return self.model.token_scores(packed, send(torch.cat(rows), self.model.device))

    def _scored(self, response: Response, scores: list[float], reason: str) -> Scored:
        """`reason` explains the missing score if `scores` is empty."""
        score = scores[-1] if scores else None
        if self.dense == "deltas" and scores and response.token_ids:
            return scored_by_prefix(response, scores[-len(response.token_ids) - 1 :], name=self.name)
        if self.dense == "absolute" and scores and response.token_ids:
            return scored_by_token(response, scores[-len(response.token_ids) :], name=self.name)
        if score is not None and math.isfinite(score):
            return Scored(response=response, score=score)
        reason = reason if score is None else f"{self.name} gave {score}"
        return Scored(response=response, score=math.nan, state=ScoreState.INFRASTRUCTURE_FAULT, reason=reason)

    def _too_long(self, length: int) -> str:
        return f"{self.name} reads at most {self.model.position_limit} of its tokens, the response makes {length}"

    def _token_ids(self, responses: Sequence[Response]) -> tuple[list[Parts], dict[int, str]]:
        """The token ids of prompt and response, and by index the errors of responses that could not be rendered."""
        parts: list[Parts] = []
        refusals: dict[int, str] = {}
        for index, response in enumerate(responses):
            both: Parts = response.prompt.token_ids, response.token_ids
            if self.encoder is not None:
                finished = response.finish.terminated
                try:
                    both = render_for(self.encoder, response.prompt, response.text, finished=finished)
                except (RenderingError, TemplateLimitError) as error:
                    both, refusals[index] = ((), ()), f"{self.name}: {error}"
            parts.append(both)
        return parts, refusals
