"""The steps of a solution: their texts, and the tokens at which they end.

A separator ends each step, also the last one. A process reward model reads the whole solution in this form, in its own
tokens, in training and in use, so a step is judged by the same tokens in both (`encode_steps`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from proximo.data.codec import UNFINISHED, decode, response_text
from proximo.data.formats.prompt_response import Exchange, assistant_turn
from proximo.data.rendering import render
from proximo.data.tokenise import Rendered, Segment, TextEncoder
from proximo.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_SEPARATOR = "\n"
_CONTEXT_TOKENS = 16
"""Number of tokens before the decoded ones; `end_of_prompt` takes a few of them."""
_MOST_UNFINISHED = 3
"""Most tokens in a row that can end within one character, which has at most 4 bytes."""


def split_steps(text: str, separator: str = DEFAULT_SEPARATOR) -> list[str]:
    """The steps of a solution, without the white space around them. Blank steps are left out."""
    return [step for part in text.split(separator) if (step := part.strip())]


@dataclass(kw_only=True)
class StepFinder:
    """Finds the tokens at which the steps of a sequence end. Caches which token ids can complete a separator."""

    tokenizer: "PreTrainedTokenizerBase"
    separator: str = DEFAULT_SEPARATOR
    _candidates: dict[int, bool] = field(default_factory=dict)

    def ends(self, token_ids: Sequence[int]) -> list[int]:
        """For each step that is followed by a separator, the index of the token that completes the separator.

        A step whose separator begins inside a token, for example `.` and a line end in one, ends with that token.
        Special tokens do not count as text. A last step without a separator is left out.
        """
        ends: list[int] = []
        start, before, num_unfinished = 0, "", 0
        for index, token in enumerate(token_ids):
            if not self._may_complete(token):
                continue
            text = before + self._behind(token_ids, start, index + 1)
            *steps, rest = text.split(self.separator)
            ends += [index for step in steps if step.strip()]
            if not steps and text.endswith(UNFINISHED) and num_unfinished < _MOST_UNFINISHED:
                num_unfinished += 1  # the next token completes a character, which may belong to the separator
                continue
            start, before, num_unfinished = index + 1, rest, 0
        return ends

    def _behind(self, token_ids: Sequence[int], start: int, end: int) -> str:
        """The text of the tokens from `start` to `end`, decoded after those before them."""
        before = token_ids[max(0, start - _CONTEXT_TOKENS) : start]
        return response_text(self.tokenizer, before, token_ids[start:end])

    def _may_complete(self, token: int) -> bool:
        """False if the text of the token excludes that a separator ends in it."""
        if token not in self._candidates:
            # Decoding may strip the space of the first token, so the second copy shows the full text.
            piece = decode(self.tokenizer, [token, token])
            self._candidates[token] = self.separator[-1] in piece or UNFINISHED in piece
        return self._candidates[token]


Solution = tuple[Exchange, Sequence[str]]
"""A prompt, and the steps that answer it: stripped, not blank, without a separator inside; at least one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedSolution:
    """A solution as the tokens that a process reward model reads."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    ends: tuple[int, ...]
    """For each step, the index in `response_ids` of the token that completes its separator."""
    rendered: Rendered


def encode_steps(
    encoder: TextEncoder, solutions: Sequence[Solution], finder: StepFinder
) -> list[EncodedSolution | None]:
    """Tokens of prompts and solutions, and where the steps end; tokenised in one call.

    None for a solution whose steps share a token, so that one cannot be judged before the next, or whose tokens decode
    to other text (without special tokens).
    """
    rendered = [_rendered(encoder, exchange, steps, finder.separator) for exchange, steps in solutions]
    encoded = []
    for (_, steps), segments, item in zip(solutions, rendered, encoder.rendered(rendered), strict=True):
        prompt, response = item.prompt.ids, item.responses[0].ids
        ends = finder.ends(response)
        found = _steps_in(encoder, segments, finder.separator)
        # A chat template may write something in front of the steps, for example an empty thought.
        as_given = all(map(str.endswith, found[-len(steps) :], steps))
        apart = as_given and len(set(ends)) == len(ends) == len(found)
        whole = EncodedSolution(
            prompt_ids=prompt, response_ids=response, ends=tuple(ends[-len(steps) :]), rendered=segments
        )
        encoded.append(whole if apart else None)
    return encoded


def _steps_in(encoder: TextEncoder, rendered: Rendered, separator: str) -> list[str]:
    """The steps that `StepFinder` should find in the tokens of a response."""
    text = "".join(segment.text for segment in rendered.responses[0])
    for mark in encoder.marks:
        text = text.replace(mark, "")
    return [step for part in text.split(separator)[:-1] if (step := part.strip())]


def check_separator(encoder: TextEncoder, separator: str) -> None:
    """Raises ConfigError for a separator that cannot be found in the tokens of a solution."""
    mark = next((mark for mark in encoder.marks if mark in separator), None)
    if mark is not None:
        raise ConfigError(
            f"step_separator {separator!r} holds the special token {mark!r} of the tokenizer '{encoder.name}', and "
            "special tokens are not part of a response's text: use ordinary text, for example a line end"
        )
    if separator not in encoder.text(encoder.texts([f"a{separator}"])[0]):
        raise ConfigError(
            f"the tokenizer '{encoder.name}' cannot write step_separator {separator!r}, so no step would end: take "
            "another one"
        )


def _rendered(encoder: TextEncoder, exchange: Exchange, steps: Sequence[str], separator: str) -> Rendered:
    """Segments of a prompt and its solution, each step followed by the separator.

    The end of the answer is left out: it would mark the last step, which in many data sets is always the wrong one.
    """
    text = separator.join(steps)
    response = text if isinstance(exchange.prompt, str) else assistant_turn(text)
    rendered = render(encoder, replace(exchange, responses=(response,)), finished=False)
    *before, last = rendered.responses[0] or (Segment(written=True),)
    # Some chat templates strip the assistant's text, so the last separator is added after them.
    return replace(rendered, responses=((*before, replace(last, text=f"{last.text.rstrip()}{separator}")),))
