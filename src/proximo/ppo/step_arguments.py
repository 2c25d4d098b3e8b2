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
    if isinstance(prompts, str):
        raise DataError("prompts must be a list of texts or Prompt records, got one text: put it in a list")
    if isinstance(prompts, torch.Tensor):
        raise DataError(
            f"prompts must be a list, got one tensor of shape {tuple(prompts.shape)}, which would hold padding: give a "
            "list of one-dimensional tensors, each as long as its prompt"
        )
    _check_list(prompts, "prompts", "texts, token ids or Prompt records")
    texts = [Exchange(origin="prompt", prompt=prompt) for prompt in prompts if isinstance(prompt, str)]
    _, encoded = encode_exchanges(TextEncoder(tokenizer), texts)
    ids = iter(encoded)

    def record(index: int, prompt: PromptLike) -> Prompt:
        if isinstance(prompt, Prompt):
            return _checked_record(prompt, num_tokens)
        if isinstance(prompt, str):
            return Prompt(id=str(index), token_ids=next(ids).prompt.ids, text=prompt)
        return _prompt_of_ids(tokenizer, index, prompt, num_tokens)

    return [record(index, prompt) for index, prompt in enumerate(prompts)]


def _check_list(given: object, what: str, items: str) -> None:
    """Raises DataError for a value without order or length, such as a generator, which can be read only once."""
    if not isinstance(given, Sized) or not hasattr(given, "__getitem__") or isinstance(given, Mapping | bytes):
        advice = ": put its values in a list" if isinstance(given, Mapping) else ""
        advice = f": write list({what})" if hasattr(given, "__iter__") and not advice else advice
        raise DataError(f"{what} must be a list of {items}, got {type(given).__name__}{advice}")


def _checked_record(prompt: Prompt, num_tokens: int | None) -> Prompt:
    if not is_token_ids(prompt.token_ids):
        raise DataError(f"token_ids of prompt {prompt.id!r} must be whole numbers, got {prompt.token_ids!r:.60}")
    token_ids = tuple(plain(prompt.token_ids))
    if num_tokens is not None:
        check_range(token_ids, num_tokens=num_tokens, what=f"prompt ({prompt.id!r})")
    return prompt if prompt.token_ids == token_ids else replace(prompt, token_ids=token_ids)


def _prompt_of_ids(tokenizer: "PreTrainedTokenizerBase", index: int, given: TokenIds, num_tokens: int | None) -> Prompt:
    if not is_token_ids(given) or not len(given):
        render = (
            "render messages with the tokenizer's apply_chat_template(..., tokenize=False, add_generation_prompt=True)"
        )
        row = "make Prompt(..., metadata={'answer': ...}) of each row, or use Training, which reads rows"
        advice = row if isinstance(given, Mapping) else f"{render} first"
        raise DataError(f"a prompt must be a text, its token ids or a Prompt, got {type(given).__name__}: {advice}")
    token_ids = tuple(plain(given))
    if num_tokens is not None:
        check_range(token_ids, num_tokens=num_tokens, what="prompt")
    # The text, with special tokens, is what reward functions and samples show for this prompt.
    return Prompt(id=str(index), token_ids=token_ids, text=TextEncoder(tokenizer).text(token_ids))


def as_scored(responses: Sequence[Response], scores: Sequence[Score] | torch.Tensor) -> list[Scored]:
    """Responses with the caller's scores. A response without a finite score is marked as unscored.

    Raises DataError if there is not one score per response.
    """
    scores = plain(scores)
    if not is_list(scores):
        raise DataError(f"scores must be a list with one for each response, got {scores!r:.60}")
    if len(scores) != len(responses):
        raise DataError(
            f"one score for each response is needed, got {len(scores)} for {count_of(len(responses), 'response')}"
        )
    return [_scored(response, score) for response, score in zip(responses, scores, strict=True)]


def _is_by_token(score: Score) -> bool:
    """Whether a score has rewards per token. A list or tensor with a single number is the score of the response."""
    listed = plain(score)
    several = is_list(listed) and len(listed) != 1
    return several or isinstance(listed, Mapping)


def _scored(response: Response, score: Score) -> Scored:
    if _is_by_token(score):
        try:
            return scored_by_token(response, score, name="scores")
        except TrainingError as error:
            raise DataError(f"a score is one number for a response, or one for each of its tokens: {error}") from error
    number = as_score(score)
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
    if masks is not None:
        _check_list(masks, "response_masks", "masks, one for each response")
    if masks is not None and len(masks) != len(responses):
        raise DataError(
            f"one mask for each response is needed, got {len(masks)} for {count_of(len(responses), 'response')}"
        )
    if not prompts or not responses or len(responses) % len(prompts):
        there, asked = count_of(len(responses), "response"), count_of(len(prompts), "prompt")
        raise DataError(f"{there} cannot be shared out among {asked}: give each the same number")
    group_size = len(responses) // len(prompts)
    for index, given in enumerate(responses):
        _check_response(given, num_tokens=policy.vocab_size)
        if isinstance(given, Response) and given.prompt.token_ids != prompts[index // group_size].token_ids:
            raise DataError(
                f"response {index} was generated to another prompt than the one given for it: pass the prompts as they "
                "were given to generate, in the order of the responses"
            )
        sampled = (
            isinstance(given, Response) and len(given.logprobs) > 0
        )  # a record without log-probs is like plain token ids
        if sampled and given.policy_version != policy_version and not others_allowed:
            raise DataError(
                f"response {index} was generated by version {given.policy_version} of the policy, which is at version "
                f"{policy_version} now, and PPO learns from samples of the current policy: generate new responses for "
                'each step, or correct for the difference with policy_loss={"behaviour_weight": "truncated"}'
            )
    endings = ending_ids(policy.base, tokenizer)

    def record(index: int, token_ids: tuple[int, ...]) -> Response:
        return Response(
            prompt=prompts[index // group_size],
            sample_index=index % group_size,
            token_ids=token_ids,
            logprobs=torch.empty(0),
            response_mask=torch.ones(len(token_ids), dtype=torch.bool),
            finish=Finish.EOS if token_ids and token_ids[-1] in endings else Finish.LENGTH,
            policy_version=policy_version,
            text=response_text(tokenizer, prompts[index // group_size].token_ids, token_ids),
        )

    records = [
        given if isinstance(given, Response) else record(index, tuple(plain(given)))
        for index, given in enumerate(responses)
    ]
    if masks is None:
        return records
    return [_with_mask(record, mask, index) for index, (record, mask) in enumerate(zip(records, masks, strict=True))]


def _with_mask(response: Response, given: Mask, index: int) -> Response:
    mask = as_mask(given, num_tokens=len(response.token_ids), index=index)
    return replace(response, response_mask=response.response_mask & mask)


def _check_response(given: ResponseLike, *, num_tokens: int) -> None:
    if isinstance(given, Response):
        return
    if not is_token_ids(given):
        raise DataError(
            f"a response must be a Response or a list of token ids, got {given!r:.60}: tokenise it, and end it "
            "with the end-of-sequence id"
        )
    check_range(plain(given), num_tokens=num_tokens, what="response")


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
