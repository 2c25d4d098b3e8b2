"""Reads a row of preference data: a prompt, the chosen and the rejected response.

The form of a source is named, or found from the columns of its first row; every row of the source must have it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from proximo.data.codec import common_length
from proximo.data.formats import transcripts
from proximo.data.formats.context_columns import in_context
from proximo.data.formats.messages import ASKING, messages_cell
from proximo.data.formats.prompt_response import Exchange, Messages, assistant_turn, user_turn
from proximo.data.formats.typed_columns import cell, text_cell, votes_cell
from proximo.data.rows import Row, columns_found, nearest
from proximo.errors import DataError

PreferenceForm = Literal["auto", "text", "conversational", "transcript", "implicit_prompt", "sharegpt", "outputs"]


def prompt_in(row: Row) -> str | Messages:
    """The prompt of a row: `prompt` (text or messages), `messages`, `conversations`, or `instruction` with `input`."""
    for field in ASKING:
        if field in row.values:
            is_text = field == "prompt" and isinstance(row.values[field], str)
            return text_cell(row, field) if is_text else messages_cell(row, field)
    if "instruction" not in row.values:
        cell(row, "prompt")
    instruction = text_cell(row, "instruction")
    context = text_cell(row, "input") if row.values.get("input") is not None else ""
    return f"{instruction}\n\n{context}" if context.strip() else instruction


def has_prompt(row: Row) -> bool:
    """Whether a column of the row holds a prompt."""
    return "instruction" in row.values or any(field in row.values for field in ASKING)


def is_preference(row: Row) -> bool:
    """Whether a row has two responses."""
    return {"chosen", "rejected"} <= row.values.keys() or {"output_1", "output_2"} <= row.values.keys()


def preference_form(row: Row) -> PreferenceForm:
    """The form that the columns of a row show. Raises DataError if they show none."""
    values = row.values
    if not is_preference(row):
        wanted = "rejected" if "chosen" in values else "chosen"
        raise DataError(
            f"{row.origin}: no column '{wanted}' (pairs need chosen and rejected, or output_1, output_2 and "
            f"label); columns found: {columns_found(row)}{nearest(wanted, values)}. "
            f"Name the column that holds it in the source: `columns: {{{wanted}: <column>}}`"
        )
    if "chosen" not in values:
        return "outputs"
    if not isinstance(values["chosen"], str) or any(_is_list(values.get(field)) for field in ASKING):
        return "conversational"
    if has_prompt(row):
        return "text"
    return "transcript" if transcripts.is_transcript(values["chosen"]) else "implicit_prompt"


def preference_exchange(row: Row, form: PreferenceForm) -> Exchange | None:
    """Prompt, chosen and rejected response of a row; None if the votes of form `outputs` are a tie."""
    exchange = _exchange(row, form)
    return None if exchange is None else in_context(row, exchange)


def preference_prompt(row: Row, form: PreferenceForm) -> Exchange:
    """The prompt of a row of preferences, also of a tie."""
    exchange = Exchange(origin=row.origin, prompt=_text_prompt(row)) if form == "outputs" else _exchange(row, form)
    assert exchange is not None, "only votes can be a tie"
    return in_context(row, replace(exchange, responses=()))


def _exchange(row: Row, form: PreferenceForm) -> Exchange | None:
    match form:
        case "text":
            return Exchange(
                origin=row.origin,
                prompt=_text_prompt(row),
                responses=(text_cell(row, "chosen"), text_cell(row, "rejected")),
            )
        case "transcript" | "implicit_prompt":
            split = transcripts.split_pair if form == "transcript" else _split_text
            prompt, *responses = split(text_cell(row, "chosen"), text_cell(row, "rejected"), row.origin)
            return Exchange(
                origin=row.origin, prompt=prompt, responses=tuple(responses), is_transcript=form == "transcript"
            )
        case "outputs":
            return _voted(row)
        case _:
            return _conversational(row)


def _text_prompt(row: Row) -> str:
    prompt = prompt_in(row)
    return prompt if isinstance(prompt, str) else text_cell(row, "prompt")


def _split_text(chosen: str, rejected: str, origin: str) -> tuple[str, str, str]:
    """(prompt, chosen, rejected) of two texts; the prompt is their common beginning, up to a whole word.

    A space belongs to the response that it begins, a line end to the prompt that it ends.
    """
    shared = chosen[: common_length(chosen, rejected)]
    last = next((index for index in reversed(range(len(shared))) if shared[index].isspace()), None)
    if last is None:
        raise DataError(
            f"{origin}: 'chosen' and 'rejected' have no beginning in common that could be their prompt (chosen "
            f"begins {chosen[:40]!r}, rejected {rejected[:40]!r}); give the prompt in a separate column, or map an "
            "empty one"
        )
    cut = last if shared[last] == " " else last + 1
    return chosen[:cut], chosen[cut:], rejected[cut:]


def _voted(row: Row) -> Exchange | None:
    """The pair with the output of most votes as the chosen one; None if as many are for the other, or for a tie."""
    votes = Counter(votes_cell(row, "label"))
    first, second = text_cell(row, "output_1"), text_cell(row, "output_2")
    prompt = _text_prompt(row)
    if votes[1] > max(votes[2], votes[0]):
        return Exchange(origin=row.origin, prompt=prompt, responses=(first, second))
    if votes[2] > max(votes[1], votes[0]):
        return Exchange(origin=row.origin, prompt=prompt, responses=(second, first))
    return None


def _conversational(row: Row) -> Exchange:
    chosen, rejected = _reply(row, "chosen"), _reply(row, "rejected")
    if chosen[0]["role"] == "assistant" and rejected[0]["role"] == "assistant":
        prompt = prompt_in(row)
        prompt = user_turn(prompt) if isinstance(prompt, str) else prompt
    else:
        cut = _parting(row, chosen, rejected)
        prompt, chosen, rejected = chosen[:cut], chosen[cut:], rejected[cut:]
    if not prompt or prompt[-1]["role"] == "assistant":
        raise DataError(f"{row.origin}: the prompt must end with a turn that the assistant answers")
    return Exchange(origin=row.origin, prompt=prompt, responses=(_to_last_reply(chosen), _to_last_reply(rejected)))


def _reply(row: Row, field: str) -> Messages:
    return assistant_turn(text_cell(row, field)) if isinstance(cell(row, field), str) else messages_cell(row, field)


def _parting(row: Row, chosen: Messages, rejected: Messages) -> int:
    """Index of the assistant's turn at which two conversations first differ, or of the last one before."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    turns = [
        turn
        for turn in range(min(shared + 1, len(chosen), len(rejected)))
        if chosen[turn]["role"] == rejected[turn]["role"] == "assistant"
    ]
    if not turns:
        raise DataError(
            f"{row.origin}: 'chosen' and 'rejected' are whole conversations, but share no turns up to an "
            "assistant's; give the prompt in a separate column"
        )
    return turns[-1]


def _to_last_reply(messages: Messages) -> Messages:
    end = max(turn for turn, message in enumerate(messages) if message["role"] == "assistant")
    return messages[: end + 1]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
