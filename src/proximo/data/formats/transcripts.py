"""Dialogues written as one text, `\\n\\nHuman: ...\\n\\nAssistant: ...`, as in HH-RLHF."""

import re
from typing import TYPE_CHECKING

from proximo.data.codec import common_length
from proximo.errors import DataError

if TYPE_CHECKING:  # it imports torch, which the reading of rows does not need
    from proximo.records import Message

_ASSISTANT = "\n\nAssistant:"
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def split_pair(chosen: str, rejected: str, origin: str) -> tuple[str, str, str]:
    """(prompt, chosen response, rejected response) of two transcripts that first differ in an assistant's turn.

    The prompt is their common beginning, up to the last `\\n\\nAssistant:` in it. If they differ earlier than in the
    last turn, the later turns belong to the responses.
    """
    cut = chosen.rfind(_ASSISTANT, 0, common_length(chosen, rejected))
    if cut < 0:
        raise DataError(
            f"{origin}: the chosen and the rejected transcript share no turn up to '\\n\\nAssistant:' "
            f"(chosen begins {chosen[:40]!r}, rejected {rejected[:40]!r}); "
            "give the prompt in a separate column, or transcripts with the same beginning"
        )
    cut += len(_ASSISTANT)
    return chosen[:cut], chosen[cut:], rejected[cut:]


def is_transcript(text: str) -> bool:
    """True for a text with turns of `Human:` and `Assistant:`."""
    return _TURN.search(text) is not None


def prompt_messages(prompt: str, origin: str) -> "tuple[Message, ...]":
    """The turns of a transcript that ends where the assistant begins."""
    turns = _turns(prompt, origin)
    if turns and turns[-1]["role"] == "assistant" and not turns[-1]["content"]:
        turns.pop()
    return tuple(turns)


def reply_messages(response: str, origin: str) -> "tuple[Message, ...]":
    """The turns of a response that begins in the assistant's turn; turns after its last answer are left out."""
    turns = _turns(_ASSISTANT + response, origin)
    while turns[-1]["role"] != "assistant":
        turns.pop()
    return tuple(turns)


def _turns(transcript: str, origin: str) -> "list[Message]":
    parts = _TURN.split(transcript)
    if parts[0].strip() or len(parts) < 3:
        raise DataError(f"{origin}: a transcript must begin with 'Human:' or 'Assistant:', got {transcript[:40]!r}")
    turns: list[Message] = []
    for speaker, content in zip(parts[1::2], parts[2::2], strict=True):
        role = _ROLES[speaker]
        if turns and turns[-1]["role"] == role:
            # Chat templates want the roles to take turns; one speaker's two paragraphs are one message.
            turns[-1] = {"role": role, "content": f"{turns[-1]['content']}\n\n{content.strip()}".strip()}
        else:
            turns.append({"role": role, "content": content.strip()})
    return turns
