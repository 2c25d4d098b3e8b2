"""Converts the prompts' reference answers to responses, whose scores serve as baselines."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from proximo.data.rendering import render_for
from proximo.data.tokenise import TextEncoder
from proximo.errors import DataError
from proximo.records import Finish, Prompt, Response

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase


def check_answers(prompts: Sequence[Prompt]) -> None:
    """Raises DataError if a prompt has no reference answer."""
    missing = [prompt.id for prompt in prompts if prompt.answer is None]
    if missing:
        raise DataError(
            f"score.minus_reference_answer needs a reference answer to every prompt, but {len(missing)} of "
            f"{len(prompts)} have none, first of them prompt {missing[0]!r}: name the column that holds it "
            "(in the source: `columns: {answer: <column>}`), or leave those rows out"
        )


def answer_responses(prompts: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase") -> list[Response]:
    """Each prompt's reference answer as a finished response, tokenised as training on it would be.

    Raises DataError if a prompt has no reference answer.
    """
    check_answers(prompts)
    encoder = TextEncoder(tokenizer)
    return [_response(prompt, str(prompt.answer), encoder) for prompt in prompts]


def _response(prompt: Prompt, answer: str, encoder: TextEncoder) -> Response:
    is_readable = prompt.messages is not None or prompt.text is not None
    # Only the answer's tokens are used; what they are depends on what they stand behind.
    readable = prompt if is_readable else replace(prompt, text=encoder.text(prompt.token_ids))
    _, token_ids = render_for(encoder, readable, answer)
    return Response(
        prompt=prompt,
        sample_index=0,
        token_ids=token_ids,
        logprobs=torch.empty(0),
        response_mask=torch.ones(len(token_ids), dtype=torch.bool),
        finish=Finish.EOS,
        policy_version=0,
        text=answer,
    )
