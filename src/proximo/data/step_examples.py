"""Rows to `StepExample`, the training input of a process reward model: a solution in steps, each with a label."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from proximo.data.formats.prompt_response import in_form
from proximo.data.formats.row_formats import LabelledSolution, labelled_solutions
from proximo.data.load_report import LoadReport
from proximo.data.loading import load_in_portions
from proximo.data.rendering import LoadOptions, count_unread
from proximo.data.rows import Row, row_id
from proximo.data.steps import DEFAULT_SEPARATOR, EncodedSolution, StepFinder, check_separator, encode_steps
from proximo.data.token_cache import TokenCache
from proximo.data.tokenise import TextEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TrainOn = Literal["all", "until_error", "last"]
"""The steps that count: all, those up to the first wrong one, or the last one alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepExample:
    """A solution, cut after the last step that counts."""

    id: str
    token_ids: tuple[int, ...]
    """Token ids of the prompt and the solution."""
    ends: tuple[int, ...]
    """Indices in `token_ids` of the last tokens of the steps that count, ascending."""
    labels: tuple[float, ...]
    """For each of these steps, whether it is right: 1, 0, or a probability."""
    num_prompt_tokens: int = 0
    """How many of the tokens are the prompt's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOptions(LoadOptions):
    """Options for turning rows into solutions with labels.

    A truncated solution loses its last steps, and is dropped if no step that counts is left.
    """

    separator: str = DEFAULT_SEPARATOR
    train_on: TrainOn = "all"


def load_step_examples(
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase",
    options: StepOptions,
    *,
    cache: TokenCache | None = None,
) -> tuple[Sequence[StepExample], LoadReport]:
    """An example for each usable row, in the order of the rows, and a report on the rows.

    Large lists are kept on disk (`large_lists.py`). Raises DataError naming a malformed row, and if no example is left;
    ConfigError for a separator that the tokenizer cannot write.
    """
    encoder = TextEncoder(tokenizer, cache)
    check_separator(encoder, options.separator)
    finder = StepFinder(tokenizer=encoder.tokenizer, separator=options.separator)
    return load_in_portions(
        rows,
        lambda remarks: labelled_solutions(rows, remarks),
        lambda item: item[1].num_characters + sum(map(len, item[2])),
        lambda portion: _portion(encoder, portion, options, finder),
        what="solution",
        limit=options.max_tokens,
    )


def _portion(
    encoder: TextEncoder,
    portion: Sequence[LabelledSolution],
    options: StepOptions,
    finder: StepFinder,
) -> tuple[list[StepExample], LoadReport]:
    exchanges = in_form(
        [exchange for _, exchange, _, _ in portion], to_messages=options.as_messages, system=options.system
    )
    separable = [
        (row_id(row), (exchange, steps), labels)
        for (row, _, steps, labels), exchange in zip(portion, exchanges, strict=True)
        if not any(options.separator in step for step in steps)
    ]
    encoded = encode_steps(encoder, [solution for _, solution, _ in separable], finder)
    apart = [
        (_example(identity, tokens, labels, options.train_on), tokens.rendered)
        for (identity, _, labels), tokens in zip(separable, encoded, strict=True)
        if tokens is not None
    ]
    fitted = [_fitted(example, options) for example, _ in apart]
    examples = [example for example in fitted if example is not None]
    rendered = [each for _, each in apart]
    report = LoadReport(
        num_rows=len(portion),
        num_kept_rows=len(examples),
        num_inseparable=len(portion) - len(apart),
        num_too_long=len(apart) - len(examples),
        num_truncated=sum(kept is not None and kept != whole for kept, (whole, _) in zip(fitted, apart, strict=True)),
        unwritable=encoder.unwritable(rendered),
        unread=count_unread(rendered),
        num_tokens=sum(len(example.token_ids) for example in examples),
    )
    return examples, report


def is_right(label: float) -> bool:
    """Whether a step with this label, or this probability, counts as right."""
    return label >= 0.5


def first_wrong(labels: Sequence[float]) -> int | None:
    """Index of the first step that is not right; None if all are."""
    return next((index for index, label in enumerate(labels) if not is_right(label)), None)


def _example(identity: str, tokens: EncodedSolution, labels: Sequence[float], train_on: TrainOn) -> StepExample:
    last = len(labels) - 1
    first = last if train_on == "last" else 0
    wrong = first_wrong(labels) if train_on == "until_error" else None
    counted = slice(first, 1 + (last if wrong is None else wrong))
    ends = [len(tokens.prompt_ids) + end for end in tokens.ends[counted]]
    return StepExample(
        id=identity,
        # Tokens after the last step that counts do not change its score.
        token_ids=(*tokens.prompt_ids, *tokens.response_ids)[: ends[-1] + 1],
        ends=tuple(ends),
        labels=tuple(labels[counted]),
        num_prompt_tokens=len(tokens.prompt_ids),
    )


def _fitted(example: StepExample, options: StepOptions) -> StepExample | None:
    limit = options.max_tokens
    if limit is None or len(example.token_ids) <= limit:
        return example
    ends = tuple(end for end in example.ends if end < limit)
    if options.too_long == "drop" or not ends:
        return None
    return replace(example, token_ids=example.token_ids[: ends[-1] + 1], ends=ends, labels=example.labels[: len(ends)])
