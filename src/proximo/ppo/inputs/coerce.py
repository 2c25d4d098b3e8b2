"""Converts user inputs of the library (models, prompts, responses, scores) to internal types."""

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch

from proximo.data.codec import response_text
from proximo.data.formats.prompt_response import Exchange
from proximo.data.rendering import encode_exchanges
from proximo.data.tokenise import TextEncoder
from proximo.errors import DataError, ModelError, TrainingError
from proximo.message_text import count_of
from proximo.models.adapter_detection import base_of, is_adapted
from proximo.models.heads import check_same_rows
from proximo.models.language import LanguageModel
from proximo.models.pretrained.vocabulary import check_vocabulary, embedding_rows
from proximo.models.scalar import ScalarModel
from proximo.models.sharing.trunk import refuse_half_shared
from proximo.ppo.inputs.token_ids import Mask, TokenIds, as_mask, as_score, check_range, is_token_ids, plain
from proximo.records import Finish, Prompt, Response, Scored, ScoreState
from proximo.rewards.token_rewards import is_list, scored_by_token
from proximo.rollout.stop_token_ids import ending_ids

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PromptLike = Prompt | str | TokenIds
ResponseLike = Response | TokenIds

Score = float | torch.Tensor | Sequence[float] | Mapping[int, float] | None
"""The score of a response, or rewards of its tokens: one per token, or index -> reward."""


def check_models(
    policy: LanguageModel,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    reference: LanguageModel | None = None,
    value: ScalarModel | Literal["trunk"] | None = None,
    moves: bool = False,
) -> None:
    """Raises ModelError if the models of the roles are incompatible, or have weights in half precision.

    A reference under bf16 may have them (`narrow_frozen`), unless it `moves`, that is follows the policy.
    """
    value = None if isinstance(value, str) else value
    stays_narrow = reference is not None and reference.precision.is_half and not moves
    for role, model in (("policy", policy), ("reference", None if stays_narrow else reference), ("value", value)):
        if model is not None:
            _check_full_precision(model, role=role)
    check_vocabulary(policy.base, tokenizer, role="policy")
    if policy.has_adapter and moves:
        raise ModelError(
            "kl.reference_every_steps moves the reference, but that of a policy with an adapter is the base below it: "
            "leave it out, or bring a policy without an adapter"
        )
    if reference is not None:
        check_same_rows(policy.vocab_size, reference.vocab_size)
        check_vocabulary(reference.base, tokenizer, role="reference")
    if value is not None:
        refuse_half_shared(value, policy)
    if value is not None and embedding_rows(value.base) < policy.vocab_size:
        raise ModelError(
            f"the value model embeds {embedding_rows(value.base)} tokens, but the policy may write any of "
            f"{policy.vocab_size}: bring a value model with the policy's vocabulary"
        )


def _check_full_precision(model: LanguageModel | ScalarModel, *, role: str) -> None:
    narrow = next((p.dtype for p in model.model.parameters() if p.dtype in (torch.bfloat16, torch.float16)), None)
    if narrow is not None:
        raise ModelError(
            f"the {role} model has weights in {str(narrow).removeprefix('torch.')}, in which PPO's small updates round "
            "to nothing: load it with dtype=torch.float32 (Precision.BF16 computes in bfloat16 above such weights)"
        )


def as_policy(model: "LanguageModel | PreTrainedModel") -> LanguageModel:
    """A LanguageModel unchanged; a transformers model wrapped and probed, like a model that is loaded from disk.

    Raises ModelError for anything else, and for a model without trainable weights.
    """
    policy = _as_language_model(model, role="policy")
    if not policy.trainable_parameters():
        raise ModelError("the policy has no weight that requires a gradient, so nothing could be learned")
    return policy


def as_reference(model: "LanguageModel | PreTrainedModel | None", policy: LanguageModel) -> LanguageModel | None:
    """Like `as_policy`, but frozen. Raises ModelError if it is the policy itself."""
    if model is None:
        return None
    reference = _as_language_model(model, role="reference")
    if reference.model is policy.model:
        raise ModelError(
            "the reference is the policy itself, and would move with it: leave reference out, and a frozen copy is made"
        )
    reference.model.requires_grad_(False).eval()
    return reference


def as_value(
    model: "ScalarModel | PreTrainedModel | Literal['trunk'] | None",
) -> ScalarModel | Literal["trunk"] | None:
    """A ScalarModel or "trunk" unchanged; a sequence classifier with one label wrapped as a ScalarModel.

    Raises ModelError for anything else.
    """
    from transformers import PreTrainedModel

    if model is None or model == "trunk" or isinstance(model, ScalarModel):
        return model
    if not isinstance(model, PreTrainedModel):
        got = repr(model) if isinstance(model, str) else type(model).__name__
        raise ModelError(
            f'value must be a ScalarModel or a sequence classifier, got {got}; "trunk" puts a head on the policy'
        )
    return ScalarModel(model)


def _as_language_model(model: "LanguageModel | PreTrainedModel", *, role: str) -> LanguageModel:
    from transformers import PreTrainedModel

    from proximo.models.probe import probe_language_model

    if isinstance(model, LanguageModel):
        return model
    if not isinstance(model, PreTrainedModel) and not is_adapted(model):
        raise ModelError(
            f"the {role} must be a model of transformers or a LanguageModel, got {type(model).__name__}: load it, "
            "for example with AutoModelForCausalLM.from_pretrained(path, dtype='float32')"
        )
    if base_of(model).get_output_embeddings() is None:
        raise ModelError(
            f"the {role} must be a language model, got {type(base_of(model)).__name__}, which has no output layer over "
            "the vocabulary: load it with AutoModelForCausalLM"
        )
    language_model = LanguageModel(model)
    _check_full_precision(language_model, role=role)  # before the probe, which would fail with a misleading reason
    probe_language_model(language_model)
    return language_model


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
        advice = "take the text out of the row" if isinstance(given, Mapping) else f"{render} first"
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
