"""What models that a caller brings must have in common, found before the first step. Not whether they can be packed."""

import torch
from transformers import PreTrainedTokenizerBase

from proximo.errors import ModelError
from proximo.models.language import LanguageModel
from proximo.models.scalar import ScalarModel
from proximo.models.vocabulary import check_vocabulary, embedding_rows


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
