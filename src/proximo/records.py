"""What flows from stage to stage: Prompt -> Response -> Scored -> Experience. Not the packed tensors of a model call.

Records are frozen, and each holds the one before it, so that what belongs together cannot part. None holds
padding: lengths and finish reasons make the masks, never a token id.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from proximo.errors import DataError
from proximo_verifiers.verifier import Finish, ScoreState

Message = Mapping[str, Any]
"""One turn of a conversation: `role` and `content`, as chat templates expect them."""
Continuation = tuple[Sequence[int], Sequence[int]]
"""A sequence of a trajectory: the ids of its context, and those that follow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt of the policy. The policy reads `token_ids`; they were made from `text` or `messages`."""

    id: str
    token_ids: tuple[int, ...]
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """What a chat template reads besides the messages, such as `tools`."""
    answer: str | None = None
    base_score: float | None = None
    """Mean score of earlier responses to it, where the data says; read by the filter of prompts."""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """Where a trajectory goes on in a further sequence: the prompt of a call did not extend the tokens before it."""

    start: int
    """Index in `Response.token_ids` of the first token of the new sequence."""
    context: tuple[int, ...]
    """All ids that the policy read before that token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingMask:
    """The tokens that each draw chose among, where top-k or top-p left others out. Without them the draw's probability
    is not known. DeepSeek-AI 2025, "DeepSeek-V3.2", section "Keep Sampling Mask"."""

    token_ids: Tensor = field(repr=False)
    """[K] int32: the tokens of the first draw, then those of the next."""
    counts: Tensor = field(repr=False)
    """[T] int64 on the CPU: how many each draw chose among; 0 where none was left out, or the policy drew nothing."""

    @classmethod
    def of(cls, parts: "Sequence[tuple[SamplingMask | None, int]]") -> "SamplingMask | None":
        """Masks end to end, each with its number of draws; None leaves no token out. None if all are.

        Raises DataError for a mask of another number of draws.
        """
        if all(mask is None for mask, _ in parts):
            return None
        for mask, length in parts:
            if mask is not None and len(mask.counts) != length:
                raise DataError(
                    f"a response has {length} tokens, and its sampling mask {len(mask.counts)} draws: cut the mask "
                    "with the tokens (SamplingMask.part)"
                )
        counts = [torch.zeros(length, dtype=torch.int64) if mask is None else mask.counts for mask, length in parts]
        return cls(token_ids=torch.cat([m.token_ids for m, _ in parts if m is not None]), counts=torch.cat(counts))

    def rows(self) -> list[list[int]]:
        """The tokens of each draw."""
        return [ids.tolist() for ids in self.token_ids.split(self.counts.tolist())]

    def part(self, start: int, end: int) -> "SamplingMask":
        """That of the draws [start, end)."""
        first, last = int(self.counts[:start].sum()), int(self.counts[:end].sum())
        return SamplingMask(token_ids=self.token_ids[first:last], counts=self.counts[start:end])


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One call of the policy in an episode, and what the environment answered."""

    start: int
    """Its tokens are [start, end) of `Response.token_ids`, all of them the policy's."""
    end: int
    text: str
    """What the environment was given."""
    reward: float = 0.0
    observation: str = ""
    """What the environment answered, as text: for people."""
    messages: tuple[Message, ...] = ()
    """The same in messages: the policy's, with its calls of tools apart, and the environment's."""
    num_tool_calls: int = 0
    num_malformed_calls: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """How a trajectory went in its environment."""

    turns: tuple[Turn, ...]
    info: Mapping[str, Any] = field(default_factory=dict)
    """The last `info` of the environment; its numbers become metrics."""
    failure: str | None = None
    """A fault of the environment or of its process, which is never a reward."""
    num_cut_observations: int = 0
    """Messages of the environment that were longer than the limit, and cut."""

    @property
    def reward(self) -> float:
        """The sum of the rewards of its turns."""
        return sum(turn.reward for turn in self.turns)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation after the first observation, up to the last turn of the policy."""
        said = [message for turn in self.turns[:-1] for message in turn.messages]
        return (*said, *(self.turns[-1].messages[:1] if self.turns else ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """One sampled answer to one prompt, or the trajectory that follows the first observation of an environment."""

    prompt: Prompt
    sample_index: int
    token_ids: tuple[int, ...]
    logprobs: Tensor = field(repr=False)
    """[T] float32: log softmax(logits / temperature) of each token, from the engine that sampled it; NaN where
    the engine gives none. Over the tokens of `sampling_mask`, where there is one."""
    response_mask: Tensor = field(repr=False)
    """[T] bool: True where the policy wrote the token."""
    finish: Finish
    policy_version: int
    """Version of the policy that drew the first token."""
    text: str
    """The decoded answer: without end-of-sequence tokens, cut before a stop string. Of a trajectory: its last turn."""
    token_versions: tuple[int, ...] | None = None
    """[T] version of the policy that drew each token; None where one drew them all. Versions never decrease."""
    forks: tuple[Fork, ...] = ()
    """Where the tokens go on in a further sequence, in order. A fork adds no token: its context is read by packing."""
    episode: Episode | None = None
    """None for an answer without an environment."""
    sampling_mask: SamplingMask | None = None
    """None where no draw left tokens out."""

    @property
    def sequences(self) -> "list[Continuation]":
        """What models read: the sequence of an answer; of a trajectory with forks, each of its sequences."""
        starts = [0, *(fork.start for fork in self.forks), len(self.token_ids)]
        contexts = [self.prompt.token_ids, *(fork.context for fork in self.forks)]
        tokens = (self.token_ids[start:end] for start, end in pairwise(starts))
        return list(zip(contexts, tokens, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A response with its score (one number) and the named parts that it was made of."""

    response: Response
    score: float
    components: Mapping[str, float] = field(default_factory=dict)
    state: ScoreState = ScoreState.SCORED
    reason: str | None = None
    answer_score: float | None = None
    """The same source's score of the answer that it is compared with (the prompt's reference answer, or the most likely
    one); None where nobody asked."""
    token_rewards: tuple[float, ...] | None = None
    """The part of the score of each token, if a source gives parts; the last token gets the remainder."""
    prefix_scores: tuple[float, ...] | None = None
    """[n + 1] the score of the prompt alone and after each token; a token earns its change of the score."""

    @property
    def valid(self) -> bool:
        """False where the response must be left out of loss, baseline and statistics."""
        return self.state.has_score and self.response.finish is not Finish.ABORTED


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """The results of the model passes over a batch: the inputs of `make_experience` besides the scores."""

    old_logprobs: Tensor
    """[T] float32: the policy's log-probs at the start of the step."""
    reference_logprobs: Tensor | None = None
    """[T] float32."""
    full_kl: Tensor | None = None
    """[T] KL over the whole vocabulary at each state; only where the configuration measures `full`."""
    values: Tensor | None = None
    """[T + R] float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience:
    """A scored batch with everything that the losses need, flat over the tokens of all responses.

    T counts the response tokens of the whole batch, R the responses.
    """

    scored: tuple[Scored, ...]
    """[R]"""
    lengths: tuple[int, ...]
    """[R] response tokens of each response; their sum is T."""
    mask: Tensor
    """[T] bool: tokens that count in losses and statistics."""
    old_logprobs: Tensor
    """[T] float32: the policy's log-probs at the start of the step."""
    reference_logprobs: Tensor | None
    """[T] float32; None in a run without KL."""
    values: Tensor | None
    """[T + R] float32: each response has one entry more than tokens; None in a run without a critic."""
    rewards: Tensor
    """[T] float32: the shaped score on the last token, minus the KL penalty."""
    advantages: Tensor
    """[T] float32, zero outside the mask."""
    returns: Tensor | None
    """[T] float32: targets of the value model; None without a critic."""
    is_flat: bool = False
    """The returns are all (nearly) one number, so that nothing of the step is for the policy to learn."""
