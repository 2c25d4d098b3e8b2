"""What a caller of the library brings, made what the trainer wants: models, prompts, responses, a reward."""

import math
from collections.abc import Sequence

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proximo.data.exchange import Exchange
from proximo.data.rendering import encode_exchanges
from proximo.data.tokenise import Encoder
from proximo.errors import ConfigError, DataError, ModelError
from proximo.models.language import LanguageModel
from proximo.models.probe import probe_language_model
from proximo.models.scalar import ScalarModel
from proximo.models.vocabulary import check_vocabulary, decode_text, embedding_rows
from proximo.records import Finish, Prompt, Response, Scored, ScoreState
from proximo.rewards.function import FunctionReward, RewardFunction
from proximo.rewards.source import RewardSource


def check_models(
    policy: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    reference: LanguageModel | None = None,
    value: ScalarModel | None = None,
    moves: bool = False,
) -> None:
    """Raises ModelError where the models of the roles do not fit together, or hold weights that cannot be trained.

    `moves` says that the reference or an average follows the policy.
    """
    for role, model in (("policy", policy), ("reference", reference), ("value", value)):
        if model is not None:
            _refuse_half_precision(model, role=role)
    check_vocabulary(policy.base, tokenizer, role="policy")
    if reference is not None and policy.has_adapter:
        raise ModelError(
            "a reference was given beside a policy with an adapter, whose base is the reference: "
            "leave reference out, or bring a policy without an adapter"
        )
    if policy.has_adapter and moves:
        raise ModelError(
            "kl.reference_every_steps and average_decay move whole models, but the policy has an adapter: leave them "
            "out, or bring a policy without an adapter"
        )
    if reference is not None and reference.vocab_size != policy.vocab_size:
        raise ModelError(
            f"the reference gives logits for {reference.vocab_size} tokens, the policy for {policy.vocab_size}: the KL "
            "compares the same tokens; bring a reference with the policy's vocabulary"
        )
    if value is not None and embedding_rows(value.base) < policy.vocab_size:
        raise ModelError(
            f"the value model embeds {embedding_rows(value.base)} tokens, but the policy may write any of "
            f"{policy.vocab_size}: bring a value model with the policy's vocabulary"
        )


def _refuse_half_precision(model: LanguageModel | ScalarModel, *, role: str) -> None:
    narrow = next((p.dtype for p in model.model.parameters() if p.dtype in (torch.bfloat16, torch.float16)), None)
    if narrow is not None:
        raise ModelError(
            f"the {role} model has weights in {str(narrow).removeprefix('torch.')}, in which PPO's small updates round "
            "to nothing: load it with dtype=torch.float32 (Precision.BF16 computes in bfloat16 above such weights)"
        )


def as_policy(model: LanguageModel | PreTrainedModel) -> LanguageModel:
    """A transformers model proven packable, as a loaded one is; a language model as it is.

    Raises ModelError for anything else, and for a model without a weight that may be trained.
    """
    policy = _as_language_model(model, role="policy")
    if not policy.trainable_parameters():
        raise ModelError("the policy has no weight that requires a gradient, so nothing could be learned")
    return policy


def as_reference(model: LanguageModel | PreTrainedModel | None) -> LanguageModel | None:
    """Like `as_policy`, and taken out of training."""
    if model is None:
        return None
    reference = _as_language_model(model, role="reference")
    reference.model.requires_grad_(False).eval()
    return reference


def as_value(model: ScalarModel | PreTrainedModel | None) -> ScalarModel | None:
    """A scalar model as it is; a sequence classifier with one label as one. Raises ModelError for anything else."""
    if model is None or isinstance(model, ScalarModel):
        return model
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"value must be a ScalarModel or a sequence classifier, got {type(model).__name__}")
    return ScalarModel(model)


def _as_language_model(model: LanguageModel | PreTrainedModel, *, role: str) -> LanguageModel:
    if isinstance(model, LanguageModel):
        return model
    if not isinstance(model, PreTrainedModel | PeftModel):
        raise ModelError(
            f"the {role} must be a model of transformers or a LanguageModel, got {type(model).__name__}: load it, "
            "for example with AutoModelForCausalLM.from_pretrained(path, dtype='float32')"
        )
    language_model = LanguageModel(model)
    _refuse_half_precision(language_model, role=role)  # it would fail the probe, and with the wrong reason
    probe_language_model(language_model)
    return language_model


def as_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt | str]) -> list[Prompt]:
    """Prompt records as they are; texts tokenised as `load_prompts` does (no EOS), with their place as id.

    Raises DataError for one text in place of a list, and for prompts that are neither.
    """
    if isinstance(prompts, str):
        raise DataError("prompts must be a list of texts or Prompt records, got one text: put it in a list")
    for given in prompts:
        if not isinstance(given, Prompt | str):
            raise DataError(
                f"a prompt must be a text or a Prompt, got {type(given).__name__}: render messages with the "
                "tokenizer's apply_chat_template(..., tokenize=False, add_generation_prompt=True) first"
            )
    texts = [Exchange(origin="prompt", prompt=given) for given in prompts if isinstance(given, str)]
    _, encoded = encode_exchanges(Encoder(tokenizer), texts)
    ids = iter(encoded)
    return [
        Prompt(id=str(index), token_ids=next(ids).prompt.ids, text=given) if isinstance(given, str) else given
        for index, given in enumerate(prompts)
    ]


def as_source(reward: RewardSource | RewardFunction) -> RewardSource:
    """A reward source as it is; a plain function wrapped as one. Raises ConfigError for what is neither."""
    if isinstance(reward, RewardSource):
        return reward
    if not callable(reward):
        raise ConfigError(f"reward must be a function or a source with a method score, got {type(reward).__name__}")
    return FunctionReward(reward)


def as_scored(responses: Sequence[Response], scores: Sequence[float | None]) -> list[Scored]:
    """Each response with the caller's score; one without a finite score is left out of everything, and counted.

    Raises DataError where there is not one score for each.
    """
    if len(scores) != len(responses):
        raise DataError(f"one score for each response is needed, got {len(scores)} for {len(responses)} responses")
    return [_scored(response, score) for response, score in zip(responses, scores, strict=True)]


def _scored(response: Response, score: float | None) -> Scored:
    number = math.nan if score is None else float(score)
    if math.isfinite(number):
        return Scored(response=response, score=number)
    fault = ScoreState.INFRASTRUCTURE_FAULT
    return Scored(response=response, score=math.nan, state=fault, reason=f"the score given is {score}")


def as_responses(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    responses: Sequence[Response | Sequence[int]],
    *,
    ending_ids: Sequence[int],
    num_tokens: int,
    policy_version: int,
) -> list[Response]:
    """Response records as they are; plain token ids as records whose log-probs are still empty.

    Raises DataError where the responses do not share out evenly among the prompts, or are no token ids of the
    policy, which has `num_tokens`.
    """
    if not prompts or not responses or len(responses) % len(prompts):
        raise DataError(
            f"{len(responses)} responses do not share out among {len(prompts)} prompts: give each the same number"
        )
    for given in responses:
        _check_response(given, num_tokens=num_tokens)
    each = len(responses) // len(prompts)

    def record(index: int, token_ids: tuple[int, ...]) -> Response:
        return Response(
            prompt=prompts[index // each],
            sample_index=index % each,
            token_ids=token_ids,
            logprobs=torch.empty(0),
            response_mask=torch.ones(len(token_ids), dtype=torch.bool),
            finish=Finish.EOS if token_ids and token_ids[-1] in ending_ids else Finish.LENGTH,
            policy_version=policy_version,
            text=decode_text(tokenizer, token_ids),
        )

    return [
        given if isinstance(given, Response) else record(index, tuple(given)) for index, given in enumerate(responses)
    ]


def _check_response(given: Response | Sequence[int], *, num_tokens: int) -> None:
    if isinstance(given, Response):
        return
    if isinstance(given, str) or not all(isinstance(token, int) for token in given):
        raise DataError(
            f"a response must be a Response or a list of token ids, got {given!r:.60}: tokenise it, and end it "
            "with the end-of-sequence id"
        )
    beyond = [token for token in given if not 0 <= token < num_tokens]
    if beyond:
        raise DataError(f"a response has the token id {beyond[0]}, but the policy has {num_tokens} tokens")
