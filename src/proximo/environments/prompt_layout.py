"""Where the turns of the policy stand in the rendering of a conversation: text of the template, and ids between.

The template renders placeholders in place of the policy's words, so that nothing that the policy wrote can be taken for
a piece of the template, and the template cannot change it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from proximo.data.codec import common_length
from proximo.data.templates.chat import ChatTemplate
from proximo.data.templates.conversation_text import DUMMY
from proximo.data.templates.limits import RenderingError
from proximo.environments.turn_renderer import TurnRenderer
from proximo.errors import ModelError
from proximo.records import Message

Item = Message | int
"""A message, or the number of a turn of the policy."""
Piece = str | tuple[int, ...]
"""Text, or ids that the policy wrote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTurn:
    """What the policy wrote in one call."""

    token_ids: tuple[int, ...]
    before: tuple[int, ...]
    """The last ids that it read: `end_of_prompt`."""
    opening: str
    """The text before it, from the end of the turn before on."""
    text: str
    """Special tokens included."""
    is_thinking: bool
    """It has a thought, and the template knows thoughts."""
    is_only_thought: bool
    """It ended within its thought."""
    is_ended: bool
    """It wrote the end of its turn."""
    last_mark: str
    """The text of its last token, if this is a special token; "" otherwise."""


class PromptLayout:
    """One rendering of a conversation, with placeholders for the thought and the answer of each turn of the policy."""

    def __init__(
        self,
        renderer: TurnRenderer,
        template: ChatTemplate,
        turns: Sequence[PolicyTurn],
        items: Sequence[Item],
        variables: Mapping[str, Any],
    ) -> None:
        """Raises RenderingError if the template refuses the conversation."""
        self._renderer, self._template, self._turns = renderer, template, turns
        self._items, self._variables = tuple(items), variables
        self._dummy = DUMMY
        words = f"{[item for item in items if not isinstance(item, int)]}{variables}"
        while self._dummy in words:
            self._dummy += DUMMY[-1]
        self._has_calls = False
        """A turn before results of tools is rendered as a call: the template refuses the results otherwise."""
        self._text = self._whole()

    def pieces(self) -> list[Piece]:
        """Text and ids, by turns. Raises ModelError for a template that writes a turn more than once or in parts."""
        found: list[Piece] = []
        done = 0
        spots = self._spots()
        for (place, number, start), (*_, following) in zip(spots, [*spots[1:], (len(self._text),)], strict=False):
            turn, before = self._turns[number], self._text[done:start]
            done = start + len(self._answer(number))
            opening = self._opening(place, number, before)
            context, ids = self._kept(turn, before, opening)
            found += [context, ids]
            skipped, is_ended = self._end(turn, self._text[done:following], ids, is_call=self._is_call(place))
            if turn.is_only_thought and opening is not None and not is_ended:
                found.append(before.partition(self._thought(number))[2])  # ends the thought
            done += skipped
        found.append(self._text[done:])
        if any(isinstance(piece, str) and self._dummy in piece for piece in found):
            raise ModelError(
                f"environment: the chat template of '{self._renderer.encoder.name}' writes a turn of the assistant "
                "more than once, or in parts, so the tokens of the policy have no place there: give another template "
                "as tokenizer.chat_template"
            )
        return joined(found)

    def _spots(self) -> list[tuple[int, int, int]]:
        """(place in the conversation, number, place in the text) of each turn that the template does not leave out."""
        spots: list[tuple[int, int, int]] = []
        done = 0
        for place, item in enumerate(self._items):
            if isinstance(item, int) and (start := self._text.find(self._answer(item), done)) >= 0:
                spots.append((place, item, start))
                done = start
        return spots

    def _opening(self, place: int, number: int, before: str) -> str | None:
        """The text before a turn that the template writes as the policy wrote it; None if it rewrites the turn.

        `before`: the text between the end of the turn before and the answer. A template that opens a turn with words of
        its own (an empty thought) rewrites it, unless the policy wrote them too.
        """
        turn = self._turns[number]
        prefix, is_there, _ = before.partition(self._thought(number))
        if turn.is_thinking and not is_there:
            return None
        is_call = self._is_call(place)
        if prefix.startswith(turn.opening):
            border = len(turn.opening)
            return turn.opening if is_call or prefix[border:].strip() in turn.text else None
        # The template changed something before the turn, or other messages are there.
        border = _border(prefix, turn.opening, lambda added: is_call or added.strip() in turn.text)
        return None if border is None else prefix[:border]

    def _kept(self, turn: PolicyTurn, before: str, opening: str | None) -> tuple[str, tuple[int, ...]]:
        """The text before a turn, and what is left of its ids."""
        if opening is not None:
            return opening, turn.token_ids
        if turn.is_only_thought:
            return before, ()
        rest, ids = self._renderer.answer(turn.before, turn.token_ids, turn.text)
        return before + rest, ids

    def _end(self, turn: PolicyTurn, behind: str, ids: Sequence[int], *, is_call: bool) -> tuple[int, bool]:
        """(number of characters behind the answer that `ids` stand for, whether the end of the turn is among them)."""
        bare = behind.lstrip()
        if ids and turn.last_mark and bare.startswith(turn.last_mark):
            return len(behind) - len(bare) + len(turn.last_mark), True
        start, ending = self._renderer.end(behind, is_call=is_call)
        if ids and turn.is_ended:
            return start + len(ending), True
        return start if is_call else 0, False

    def _whole(self) -> str:
        try:
            return self._rendered(self._items)
        except RenderingError as refused:
            if not any(_role(item) == "tool" for item in self._items):
                raise
            self._has_calls = True
            try:
                return self._rendered(self._items)
            except RenderingError:
                raise refused from None

    def _rendered(self, items: Sequence[Item]) -> str:
        messages = [
            self._stand_in(item, _results(self._items, place)) if isinstance(item, int) else item
            for place, item in enumerate(items)
        ]
        return self._template.text(messages, open_reply=True, variables=self._variables)

    def _stand_in(self, number: int, results: Sequence[Message]) -> Message:
        turn = self._turns[number]
        thought = f"<think>\n{self._thought(number)}\n</think>" if turn.is_thinking else ""
        thought += "\n\n" if turn.is_only_thought else ""  # other turns bring the white space before their answer
        answer = self._answer(number)
        if not (self._has_calls and results):
            return {"role": "assistant", "content": thought + answer}
        calls = [
            {
                "type": "function",
                "id": result.get("tool_call_id", ""),
                "function": {"name": result.get("name") or "tool", "arguments": {"a": answer if index == 0 else ""}},
            }
            for index, result in enumerate(results)
        ]
        return {"role": "assistant", "content": thought, "tool_calls": calls}

    def _is_call(self, place: int) -> bool:
        return self._has_calls and bool(_results(self._items, place))

    def _thought(self, number: int) -> str:
        return f"{self._dummy}{number}t"

    def _answer(self, number: int) -> str:
        return f"{self._dummy}{number}a"


def _border(text: str, opening: str, may_follow: Callable[[str], bool]) -> int | None:
    """Where a turn begins in a text that ends with its first words: behind the longest ending of `opening` in it.

    `may_follow`: whether the turn may begin with what stands behind a place. None: nowhere.
    """
    ends = [end for end in range(1, len(text) + 1) if text[end - 1] == opening[-1:] and may_follow(text[end:])]
    lengths = {end: common_length(text[max(0, end - len(opening)) : end][::-1], opening[::-1]) for end in ends}
    return max(ends, key=lengths.__getitem__, default=None)


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces without empty ones, and with texts that follow each other as one."""
    found: list[Piece] = []
    for piece in pieces:
        if piece and isinstance(piece, str) and found and isinstance(found[-1], str):
            found[-1] += piece
        elif piece:
            found.append(piece)
    return found


def _role(item: Item) -> str | None:
    return None if isinstance(item, int) else str(item["role"])


def _results(items: Sequence[Item], place: int) -> list[Message]:
    """The results of tools directly after a turn."""
    following = takewhile(lambda item: _role(item) == "tool", items[place + 1 :])
    return [item for item in following if not isinstance(item, int)]
