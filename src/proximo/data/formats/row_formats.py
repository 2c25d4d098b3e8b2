"""Reads rows by their use: prompts (PPO), prompts with a response (fine-tuning), labelled responses (KTO), pairs, and
solutions in labelled steps (process reward models). Imports no torch."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from proximo.data.formats.column_use import read_by_source
from proximo.data.formats.context_columns import in_context
from proximo.data.formats.messages import ANSWERS, messages_cell
from proximo.data.formats.preference_formats import (
    PreferenceForm,
    has_prompt,
    is_preference,
    preference_exchange,
    preference_form,
    preference_prompt,
    prompt_in,
)
from proximo.data.formats.prompt_response import Exchange, assistant_turn, opening, refuse_weights
from proximo.data.formats.typed_columns import cell, describe, flag_cell, text_cell
from proximo.data.load_report import Remark
from proximo.data.rows import Row, columns_found, nearest
from proximo.errors import DataError

TextForm = Literal["auto", "text", "prompt_response", "messages"]
LabelledForm = Literal["auto", "prompt_response", "messages", "pairs"]

_NOT_METADATA = frozenset({"prompt", "messages", "conversations", "base_scores"})


def prompt_exchanges(
    rows: Iterable[Row], remarks: Counter[Remark], first_words: int | None = None
) -> Iterator[Exchange]:
    """The prompt of each row, without responses; for a pair, the prompt of both responses.

    A last turn of the assistant is left out, because the policy writes it. No column counts as unused, because rewards
    get the rest. `remarks`, here and below: see `read_by_source`. `first_words`: the number of words kept of a text.
    """
    for exchange in read_by_source(rows, _prompt_reader, remarks, others_used=None):
        yield exchange if first_words is None else opening(exchange, first_words)


def prompt_metadata(row: Row) -> dict[str, Any]:
    """The columns of a row except the prompt, and except a reference answer that is text or missing."""
    answer = row.values.get("answer")
    left_out = _NOT_METADATA | {"answer"} if answer is None or isinstance(answer, str) else _NOT_METADATA
    return {name: value for name, value in row.values.items() if name not in left_out}


def text_exchanges(
    rows: Iterable[Row], remarks: Counter[Remark], form: TextForm = "auto", *, learns_all: bool = False
) -> Iterator[Exchange | None]:
    """Prompt and response of each row: plain text (the prompt is ""), both columns, messages, or a pair's chosen.

    Turns after the assistant's last are left out. None for a pair that is a tie. `learns_all`: whether every message
    is learned, so that none may have weight 0.
    """
    for exchange in read_by_source(rows, lambda row: _text_reader(row, form), remarks):
        if learns_all and exchange is not None:
            refuse_weights(exchange)
        yield exchange


def preference_exchanges(
    rows: Iterable[Row], remarks: Counter[Remark], form: PreferenceForm = "auto"
) -> Iterator[Exchange | None]:
    """Prompt, chosen and rejected response of each row; None for a tie."""

    def reader(row: Row) -> Callable[[Row], Exchange | None]:
        row_form = preference_form(row) if form == "auto" else form
        return lambda any_row: preference_exchange(any_row, row_form)

    return read_by_source(rows, reader, remarks, others_used=("id", "margin"))


def labelled_exchanges(
    rows: Iterable[Row], remarks: Counter[Remark], form: LabelledForm = "auto"
) -> Iterator[dict[bool, Exchange]]:
    """For each row, label -> prompt and response: True for a desirable response, False for an undesirable one.

    A row has one response with its `label`, or is a pair: its chosen response is desirable, the rejected one is not.
    Empty for a pair that is a tie.
    """
    return read_by_source(rows, lambda row: _labelled_reader(row, form), remarks)


def _response_field(row: Row) -> str | None:
    """The column with the response: `response`, TRL's `completion`, Alpaca's `output`; None if there is none."""
    return next((field for field in ANSWERS if field in row.values), None)


def _prompt_reader(first: Row) -> Callable[[Row], Exchange]:
    if is_preference(first):
        form = preference_form(first)
        return lambda row: preference_prompt(row, form)
    if not has_prompt(first) and "text" in first.values:
        raise DataError(
            f"{first.origin}: no column 'prompt', only 'text'; to continue texts, set `prompt: text` under columns"
        )
    return _prompt_of


def _prompt_of(row: Row) -> Exchange:
    prompt = prompt_in(row)
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        prompt = prompt[:-1]
        if not prompt:
            raise DataError(f"{row.origin}: the messages hold only a turn of the assistant: no prompt")
    return in_context(row, Exchange(origin=row.origin, prompt=prompt))


def _text_reader(first: Row, form: TextForm) -> Callable[[Row], Exchange | None]:
    form = _text_form(first) if form == "auto" and not is_preference(first) else form
    match form:
        case "text":
            return lambda row: Exchange(origin=row.origin, prompt="", responses=(text_cell(row, "text"),))
        case "prompt_response":
            return _prompt_response
        case "messages":
            return _whole_conversation
        case "auto":
            pair_form = preference_form(first)
            return lambda row: _chosen(row, pair_form)


def _text_form(row: Row) -> TextForm:
    if has_prompt(row) and _response_field(row) is not None:
        return "prompt_response"
    if "messages" in row.values or "conversations" in row.values:
        return "messages"
    if "text" in row.values:
        return "text"
    wanted = "response" if has_prompt(row) else "prompt"
    raise DataError(
        f"{row.origin}: the columns hold no text to train on: wanted text, or prompt and response (or completion, or "
        "output), or messages; "
        f"columns found: {columns_found(row)}{nearest(wanted, row.values)}. "
        f"Name the column that holds it in the source: `columns: {{{wanted}: <column>}}`"
    )


def _prompt_response(row: Row) -> Exchange:
    prompt, field = prompt_in(row), _response_field(row) or ANSWERS[0]
    if isinstance(prompt, str):
        return in_context(row, Exchange(origin=row.origin, prompt=prompt, responses=(text_cell(row, field),)))
    is_text = isinstance(row.values.get(field), str)
    response = assistant_turn(text_cell(row, field)) if is_text else messages_cell(row, field)
    if response[0]["role"] != "assistant" or response[-1]["role"] != "assistant":
        raise DataError(f"{row.origin}: the response must begin and end with a turn of the assistant")
    return in_context(row, Exchange(origin=row.origin, prompt=prompt, responses=(response,)))


def _whole_conversation(row: Row) -> Exchange:
    messages = messages_cell(row, "messages" if "messages" in row.values else "conversations")
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise DataError(f"{row.origin}: the messages hold no turn of the assistant: there is nothing to learn")
    last = turns[-1]
    if last == 0:
        raise DataError(f"{row.origin}: the conversation must begin with a turn of the user or a system message")
    return in_context(row, Exchange(origin=row.origin, prompt=messages[:last], responses=(messages[last : last + 1],)))


def _chosen(row: Row, form: PreferenceForm) -> Exchange | None:
    pair = preference_exchange(row, form)
    if pair is None:
        return None
    return replace(pair, responses=pair.responses[:1])


def _labelled_reader(first: Row, form: LabelledForm) -> Callable[[Row], dict[bool, Exchange]]:
    if form == "pairs" or (form == "auto" and is_preference(first)):
        pair_form = preference_form(first)
        return lambda row: _both_labelled(row, pair_form)
    text_form = _text_form(first) if form == "auto" else form
    if text_form == "text":
        raise DataError(
            f"{first.origin}: no column 'prompt', only 'text'; a label is about a response to a prompt: name their "
            "columns in the source: `columns: {prompt: <column>, response: <column>}`"
        )
    read = _prompt_response if text_form == "prompt_response" else _whole_conversation
    return lambda row: {flag_cell(row, "label"): read(row)}


def _both_labelled(row: Row, form: PreferenceForm) -> dict[bool, Exchange]:
    pair = preference_exchange(row, form)
    if pair is None:
        return {}
    return {
        label: replace(pair, responses=(response,))
        for label, response in zip((True, False), pair.responses, strict=True)
    }


LabelledSolution = tuple[Row, Exchange, tuple[str, ...], tuple[float, ...]]
"""A row, its prompt, its steps, and for each step whether it is right: 1, 0, or a probability."""


def labelled_solutions(rows: Iterable[Row], remarks: Counter[Remark]) -> Iterator[LabelledSolution]:
    """The solution of each row. `remarks`: see `read_by_source`. Raises DataError naming a malformed row."""
    return read_by_source(rows, lambda _: _solution, remarks)


def _solution(row: Row) -> LabelledSolution:
    return row, in_context(row, Exchange(origin=row.origin, prompt=prompt_in(row))), *_labelled(row)


def _labelled(row: Row) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """The steps and labels of a row; the columns are `steps` or TRL's `completions`, and `labels`."""
    field = "completions" if "steps" not in row.values and "completions" in row.values else "steps"
    steps = tuple(_step(row, field, step) for step in _list(row, field))
    labels = tuple(_label(row, label) for label in _list(row, "labels"))
    if len(steps) != len(labels):
        raise DataError(
            f"{row.origin}: column 'labels' must have one label for each of the {len(steps)} steps, got {len(labels)}"
        )
    return steps, labels


def _list(row: Row, field: str) -> Sequence[Any]:
    value = cell(row, field)
    if not isinstance(value, list | tuple) or not value:
        raise DataError(
            f"{row.origin}: column '{field}' must be a list with an entry for each step, got {describe(value)}"
        )
    return value


def _step(row: Row, field: str, step: Any) -> str:
    text = text_cell(replace(row, values={field: step}), field).strip()
    if not text:
        raise DataError(f"{row.origin}: column '{field}' has a blank step: leave it out, with its label")
    return text


def _label(row: Row, label: Any) -> float:
    is_number = isinstance(label, bool | int | float)
    if not is_number or not 0 <= label <= 1:  # NaN is neither
        raise DataError(
            f"{row.origin}: a label must be true, false, or the probability that the step is right, from 0 to 1; got "
            f"{describe(label)}"
        )
    return float(label)
