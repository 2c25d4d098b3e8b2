"""What a caller of the library brings, made what the trainer wants: models, prompts, responses, a reward."""

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proximo.data.exchange import Exchange
from proximo.data.rendering import encode_exchanges
from proximo.data.tokenise import Encoder
from proximo.errors import ModelError
from proximo.models.language import LanguageModel
from proximo.models.probe import probe_language_model
from proximo.models.scalar import ScalarModel
from proximo.models.vocabulary import check_vocabulary, decode_text, embedding_rows
from proximo.records import Finish, Prompt, Response
from proximo.rewards.function import FunctionReward, RewardFunction
from proximo.rewards.source import RewardSource


def check_models(
    policy: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    reference: LanguageModel | None = None,
    value: ScalarModel | None = None,
) -> None:
    """Raises ModelError where the models of the roles do not fit together, or hold weights that cannot be trained."""
    for role, model in (("policy", policy), ("reference", reference), ("value", value)):
        if model is not None:
            _refuse_half_precision(model, role=role)
    check_vocabulary(policy.base, tokenizer, role="policy")
    if reference is not None and policy.has_adapter:
        raise ModelError(
            "a reference was given beside a policy with an adapter, whose base with the adapter off is the reference: "
            "leave reference out, or bring a policy without an adapter"
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


def as_probed(model: PreTrainedModel) -> LanguageModel:
    """A model that the caller brings is proven packable first, as a loaded one is."""
    language_model = LanguageModel(model)
    probe_language_model(language_model)
    return language_model


def as_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt | str]) -> list[Prompt]:
    """Prompt records as they are; texts tokenised as `load_prompts` does (no EOS), with their place as id."""
    texts = [Exchange(origin="prompt", prompt=given) for given in prompts if isinstance(given, str)]
    _, encoded = encode_exchanges(Encoder(tokenizer), texts)
    ids = iter(encoded)
    return [
        Prompt(id=str(index), token_ids=next(ids).prompt.ids, text=given) if isinstance(given, str) else given
        for index, given in enumerate(prompts)
    ]


def as_source(reward: RewardSource | RewardFunction) -> RewardSource:
    """A reward source as it is; a plain function wrapped as one."""
    return FunctionReward(reward) if isinstance(reward, Callable) else reward


def as_responses(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    responses: Sequence[Response | Sequence[int]],
    *,
    ending_ids: Sequence[int],
    policy_version: int,
) -> list[Response]:
    """Response records as they are; plain token ids as records whose log-probs are still empty.

    Raises ValueError where the responses do not share out evenly among the prompts.
    """
    if not prompts or len(responses) % len(prompts):
        raise ValueError(f"{len(responses)} responses do not share out among {len(prompts)} prompts")
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
