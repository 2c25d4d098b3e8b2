"""A conversation as clients know it, in messages, beside the dialogue that holds it as ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proximo.environments.dialogue import Dialogue
from proximo.environments.prompt_layout import Item
from proximo.environments.tool_calls import Tools
from proximo.records import Message

Said = tuple[str, str, list[tuple[str, Mapping[str, Any]]]]
History = tuple[Said, ...]


@dataclass(kw_only=True, eq=False, slots=True)
class Conversation:
    """What clients of a trajectory and the policy said to each other with the same tools, also in several threads."""

    tools: Tools
    dialogue: Dialogue
    turns: list[tuple[History, int]] = field(default_factory=list)
    """The answers of the policy with all that came before, as clients know them, and their numbers in the dialogue."""

    def items(self, messages: Sequence[Message]) -> list[Item]:
        """The messages, with answers of the policy by their numbers: those after the same messages, or the newest with
        the same words, as in a history that a client has shortened.
        """
        said = tuple(map(words_of, messages))
        return [self._number(said[: place + 1], message) for place, message in enumerate(messages)]

    def _number(self, history: History, message: Message) -> Item:
        if message["role"] != "assistant":
            return message
        same = [number for known, number in self.turns if known == history]
        alike = [number for known, number in self.turns if known[-1] == history[-1]]
        return next(reversed(same or alike), message)


def words_of(message: Message) -> Said:
    """What identifies a message, since clients drop or add white space and keys of their own."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["role"], message["content"].strip(), calls
