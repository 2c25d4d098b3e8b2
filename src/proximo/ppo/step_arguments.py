"""Turns what a caller gives for a step (prompts, responses, scores, masks) into records, or says what is wrong."""

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from proximo.data.codec import response_text
from proximo.data.formats.prompt_response import Exchange
from proximo.data.rendering import encode_exchanges
from proximo.data.tokenise import TextEncoder
from proximo.errors import DataError, TrainingError
from proximo.message_text import count_of
from proximo.models.language import LanguageModel
from proximo.records import Finish, Prompt, Response, Scored, ScoreState
from proximo.rewards.source import as_number, is_list, scored_by_token
from proximo.rollout.stopping import ending_ids

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

TokenIds = Sequence[int] | Tensor
"""The ids of one sequence, without padding."""
Mask = Sequence[bool] | Sequence[int] | Tensor
"""True (or 1) for each token that the policy wrote."""
PromptLike = Prompt | str | TokenIds
ResponseLike = Response | TokenIds

Score = float | torch.Tensor | Sequence[float] | Mapping[int, float] | None
"""The score of a response, or rewards of its tokens: one per token, or index -> reward."""


def as_prompts(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[PromptLike], *, num_tokens: int | None = None
) -> list[Prompt]:
    """Prompts as records. Texts are tokenised as by `load_prompts`, without EOS. The id of a new record is its index.

    Raises DataError for a non-list, for items of other types, and for token ids of `num_tokens` or above.
    """
    if isinstance(prompts, Tensor):
        raise DataError("prompts must be a list, got one tensor, which would hold padding: give one tensor for each")
    _check_list(prompts, "prompts", "texts, token ids or Prompt records")
    encoder = TextEncoder(tokenizer)
    texts = [Exchange(origin="prompt", prompt=prompt) for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(encode_exchanges(encoder, texts)[1])

    def record(index: int, prompt: PromptLike) -> Prompt:
        if isinstance(prompt, str):
            return Prompt(id=str(index), token_ids=next(encoded).prompt.ids, text=prompt)
        given = prompt.token_ids if isinstance(prompt, Prompt) else prompt
        what = f"prompt {index} must be a text, a Prompt or its token ids (apply_chat_template makes them of messages)"
        token_ids = _token_ids(given, what, num_tokens=num_tokens)
        if isinstance(prompt, Prompt):
            return prompt if prompt.token_ids == token_ids else replace(prompt, token_ids=token_ids)
        if not token_ids:
            raise DataError(f"{what}, got none")
        # The text, with special tokens, is what reward functions and samples show for this prompt.
        return Prompt(id=str(index), token_ids=token_ids, text=encoder.text(token_ids))

    return [record(index, prompt) for index, prompt in enumerate(prompts)]


def _check_list(given: object, what: str, items: str) -> None:
    """Raises DataError for one text, and for what has no order or length, as a generator."""
    if isinstance(given, str | bytes | Mapping) or not (isinstance(given, Sized) and hasattr(given, "__getitem__")):
        advice = f": write list({what})" if hasattr(given, "__iter__") else ""
        advice = ": put its values in a list" if isinstance(given, Mapping) else advice
        advice = ": write [text] for one" if isinstance(given, str | bytes) else advice
        raise DataError(f"{what} must be a list of {items}, got {type(given).__name__}{advice}")


def _token_ids(given: Any, what: str, *, num_tokens: int | None) -> tuple[int, ...]:
    """One sequence of integers of any type. Raises DataError for anything else, and for ids beyond the vocabulary."""
    listed = plain(given)
    if not is_list(listed) or any(type(token) is not int for token in listed):
        raise DataError(f"{what}, got {given!r:.60}")
    beyond = [token for token in listed if num_tokens is not None and not 0 <= token < num_tokens]
    if beyond:
        raise DataError(f"{what}: it has the token id {beyond[0]}, but the policy has {num_tokens} tokens")
    return tuple(listed)


def as_scored(responses: Sequence[Response], scores: Sequence[Score] | torch.Tensor) -> list[Scored]:
    """Responses with the caller's scores. A response without a finite score is marked as unscored.

    Raises DataError if there is not one score per response.
    """
    scores = plain(scores)
    if not is_list(scores) or len(scores) != len(responses):
        got = len(scores) if is_list(scores) else f"{scores!r:.60}"
        there = count_of(len(responses), "response")
        raise DataError(f"scores must be a list with one for each response, got {got} for {there}")
    return [_scored(response, score) for response, score in zip(responses, scores, strict=True)]


def _scored(response: Response, score: Score) -> Scored:
    """Several numbers, or numbers by index, are rewards of tokens; one number, or None, is the score."""
    given: Any = plain(score)
    try:
        if isinstance(given, Mapping) or (is_list(given) and len(given) != 1):
            return scored_by_token(response, given, name="scores")
        number = as_number(given[0] if is_list(given) else given)
    except (TypeError, ValueError, TrainingError) as error:
        raise DataError(
            f"a score is one number for a response, or one for each of its tokens, got {given!r:.60}: {error}"
        ) from error
    if math.isfinite(number):
        return Scored(response=response, score=number)
    fault = ScoreState.INFRASTRUCTURE_FAULT
    return Scored(response=response, score=math.nan, state=fault, reason=f"the score given is {score}")


def as_responses(
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[Prompt],
    responses: Sequence[ResponseLike],
    *,
    policy: LanguageModel,
    policy_version: int,
    others_allowed: bool = False,
    masks: Sequence[Mask] | None = None,
) -> list[Response]:
    """Responses as records. Token ids become records with empty log-probs.

    `masks`: True for the tokens of each response that the policy wrote, combined with the record's own mask.
    `others_allowed`: whether records may come from another sampler or an earlier version of the policy.

    Raises DataError if the number of responses is not a multiple of the number of prompts, token ids are not in the
    policy's vocabulary, a record with log-probs comes from an earlier version of the policy, or a mask does not fit.
    """
    _check_list(responses, "responses", "Response records or token ids")
    if not prompts or not responses or len(responses) % len(prompts):
        there, asked = count_of(len(responses), "response"), count_of(len(prompts), "prompt")
        raise DataError(f"{there} cannot be shared out among {asked}: give each the same number")
    group_size = len(responses) // len(prompts)
    endings = ending_ids(policy.base, tokenizer)

    def record(index: int, given: ResponseLike) -> Response:
        prompt = prompts[index // group_size]
        if not isinstance(given, Response):
            what = f"response {index} must be a Response or a list of token ids"
            token_ids = _token_ids(given, what, num_tokens=policy.vocab_size)
            return Response(
                prompt=prompt,
                sample_index=index % group_size,
                token_ids=token_ids,
                logprobs=torch.empty(0),
                response_mask=torch.ones(len(token_ids), dtype=torch.bool),
                finish=Finish.EOS if token_ids and token_ids[-1] in endings else Finish.LENGTH,
                policy_version=policy_version,
                text=response_text(tokenizer, prompt.token_ids, token_ids),
            )
        if given.prompt.token_ids != prompt.token_ids:
            raise DataError(
                f"response {index} was generated to another prompt than the one given for it: pass the prompts as they "
                "were given to generate, in the order of the responses"
            )
        # A record without log-probs is like plain token ids.
        if len(given.logprobs) and given.policy_version != policy_version and not others_allowed:
            raise DataError(
                f"response {index} was generated by version {given.policy_version} of the policy, which is at version "
                f"{policy_version} now, and PPO learns from samples of the current policy: generate new responses for "
                'each step, or correct for the difference with policy_loss={"behaviour_weight": "truncated"}'
            )
        return given

    records = [record(index, given) for index, given in enumerate(responses)]
    return records if masks is None else _with_masks(records, masks)


def _with_masks(records: Sequence[Response], masks: Sequence[Mask]) -> list[Response]:
    """Raises DataError if a mask does not have one True or False (1 or 0) per token of its response."""
    _check_list(masks, "response_masks", "masks")
    if len(masks) != len(records):
        raise DataError(
            f"one mask for each response is needed, got {len(masks)} for {count_of(len(records), 'response')}"
        )
    masked = []
    for index, (record, mask) in enumerate(zip(records, masks, strict=True)):
        listed, num_tokens = plain(mask), len(record.token_ids)
        if not is_list(listed) or len(listed) != num_tokens or not set(listed) <= {0, 1}:
            raise DataError(
                f"response_masks has one True or False for each token of a response; response {index} has {num_tokens} "
                f"tokens, its mask is {listed!r:.60}: leave the prompt and padding out"
            )
        flags = torch.tensor(listed, dtype=torch.bool)
        masked.append(replace(record, response_mask=record.response_mask & flags))
    return masked


def plain(given: Any) -> Any:
    """Tensors, arrays and their scalars as Python lists and numbers, also in a list; anything else unchanged."""
    if isinstance(given, Tensor | np.ndarray | np.generic):
        return given.tolist()
    if is_list(given) and any(map(_is_scalar, given)):
        return [item.tolist() if _is_scalar(item) else item for item in given]
    return given


def _is_scalar(given: Any) -> bool:
    return isinstance(given, Tensor | np.ndarray | np.generic) and given.ndim == 0
