"""The reward source of a reward model: the output of its head at the last token of a response, or at each token."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from proximo.data.rendering import render_for
from proximo.data.templates.limits import RenderingError, TemplateLimitError
from proximo.data.tokenise import TextEncoder
from proximo.distributed.world import current
from proximo.errors import ConfigError
from proximo.metrics.values import MetricValue
from proximo.models.packing import Packed, pack, plan_shares, send, shareable_prefixes
from proximo.models.precision.compute import casting
from proximo.models.pretrained.vocabulary import check_vocabulary
from proximo.models.scalar import ScalarModel
from proximo.records import Response, Scored, ScoreState
from proximo.rewards.source import BatchStatistics, scored_by_prefix, scored_by_token

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

Dense = Literal["none", "deltas", "absolute"]
"""Per-token rewards: none, the change that a token makes to the score, or the score up to the token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The input of a reward model for a response."""

    prompt_ids: Sequence[int] = ()
    response_ids: Sequence[int] = ()
    places: Sequence[int] = ()
    """Ascending indices of the tokens of prompt and response whose scores are wanted. None is before the last token of
    the prompt, since responses to one prompt share the tokens before."""
    refusal: str | None = None
    """Why the response cannot be read, if it cannot."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Those of prompt and response."""
        return (*self.prompt_ids, *self.response_ids)


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
                f"the reward model {name!r} has its own tokenizer, so its scores after each token are not those "
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
        readings = [self._reading(response) for response in responses]
        known = self._scores_of([reading if self._can_read(reading) else None for reading in readings])
        scored = [
            self._scored(response, scores, reading.refusal or self._too_long(len(reading.token_ids)))
            for response, reading, scores in zip(responses, readings, known, strict=True)
        ]
        if current().leads:
            self._statistics.count(scored, time.monotonic() - start)
        return scored

    def statistics(self) -> dict[str, MetricValue]:
        """The metrics of this source since the last call. Its seconds are those of whole batches."""
        return self._statistics.taken(self.name)

    def _can_read(self, reading: Reading) -> bool:
        if reading.refusal is not None or not reading.places:
            return False
        # Lengths in the policy's tokens are checked before training, so only re-rendered sequences can be too long.
        limit = None if self.encoder is None else self.model.position_limit
        return limit is None or len(reading.token_ids) <= limit

    def _scores_of(self, readings: Sequence[Reading | None]) -> list[list[float]]:
        """For each response its scores at the wanted places; none for None."""
        world = current()
        wanted = {index: reading for index, reading in enumerate(readings) if reading is not None}
        indices, given = list(wanted), list(wanted.values())
        prefixes = shareable_prefixes([reading.prompt_ids for reading in given])
        plans = plan_shares(
            [len(reading.token_ids) for reading in given],
            token_budget=self.tokens_per_microbatch,
            num_ranks=world.size,
            prefixes=prefixes,
        )
        results = []
        with casting(), self.model.backbone.at_work():
            for batch in plans[world.rank]:
                # A rank without a batch takes a pass over one token, since the ranks meet in every pass.
                read = [given[i] for i in batch] or [Reading(response_ids=(0,), places=(0,))]
                packed = pack(
                    [reading.token_ids for reading in read],
                    shareable=[len(prefixes[i]) for i in batch] or [0],
                    device=self.model.device,
                )
                scores = self.model.backbone.run_pass(partial(self._scores, packed, read))
                results.append(scores if batch else scores[:0])
        if not results:
            return [[] for _ in readings]
        rows = world.gather_rows(torch.cat(results), what=f"scores of {self.name}")
        order = [i for plan in plans for batch in plan for i in batch]
        pieces = rows.split([len(given[i].places) for i in order])
        found = {indices[i]: piece.tolist() for i, piece in zip(order, pieces, strict=True)}
        return [found.get(index, []) for index in range(len(readings))]

    def _scores(self, packed: Packed, readings: Sequence[Reading]) -> Tensor:
        """The scores at the wanted places, response by response."""
        ends = (packed.last_indices + 1).tolist()
        rows = [
            end - len(reading.token_ids) + place
            for end, reading in zip(ends, readings, strict=True)
            for place in reading.places
        ]
        return self.model.token_scores(packed, send(torch.tensor(rows), self.model.device))

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

    def _reading(self, response: Response) -> Reading:
        """The token ids of prompt and response, and the last of them; with `dense` also those from the prompt's last
        token on."""
        prompt, answer = response.prompt.token_ids, response.token_ids
        if self.encoder is not None:
            finished = response.finish.terminated
            try:
                prompt, answer = render_for(self.encoder, response.prompt, response.text, finished=finished)
            except (RenderingError, TemplateLimitError) as error:
                return Reading(refusal=f"{self.name}: {error}")
        last = len(prompt) + len(answer) - 1
        first = last if self.dense == "none" else max(0, len(prompt) - 1)
        return Reading(prompt_ids=prompt, response_ids=answer, places=range(first, last + 1))
