"""A tokenizer with its chat template, as dialogues use it: what is the same for all trajectories of a run."""

import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from proximo.data.codec import UNFINISHED, decode, decode_behind, end_of_prompt
from proximo.data.templates.chat import ChatTemplate, end_of_turn_ids
from proximo.data.templates.conversation_text import DUMMY
from proximo.data.templates.limits import RenderingError
from proximo.data.tokenise import Place, TextEncoder
from proximo.environments.tool_calls import ToolStyle, marks_of, parse, style_of
from proximo.errors import ConfigError, ModelError
from proximo.records import Finish, Message

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

_DATE = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")
_TOOL = {"type": "function", "function": {"name": DUMMY, "description": "a", "parameters": {"type": "object"}}}


class TurnRenderer:
    """Writes conversations by the tokenizer's chat template; plain texts, one after the other, where it has none."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        variables: Mapping[str, Any] | None = None,
        max_observation_tokens: int | None = None,
        tool_style: ToolStyle | None = None,
        now: datetime | None = None,
    ) -> None:
        """`variables`: of the chat template, such as `enable_thinking`. `tool_style`: None finds it in the template.

        `now`: the date that a template writes, this moment by default; a dialogue that goes on past midnight keeps it.
        Raises ModelError for a template that cannot be rendered, ConfigError for a limit below 1.
        """
        if max_observation_tokens is not None and max_observation_tokens < 1:
            raise ConfigError(f"max_observation_tokens must be at least 1, got {max_observation_tokens}")
        self.tokenizer = tokenizer = _dated(tokenizer, now or datetime.now())
        self.encoder = TextEncoder(tokenizer)
        self.variables = dict(variables or {})
        self.max_observation_tokens = max_observation_tokens
        end_of_turn_ids(self.encoder)  # tries a template that may loop in a child process first
        self.template = ChatTemplate(self.encoder, "environment", self.variables) if tokenizer.chat_template else None
        asked = {"role": "user", "content": "a"}
        if self.template is not None and self._tried([asked, {**asked, "role": "assistant"}, asked]) is None:
            raise ModelError(
                f"environment: the chat template of '{self.encoder.name}' takes no turn of the user after one of the "
                "assistant, so no environment can answer: give another as tokenizer.chat_template"
            )
        self._is_style_given = tool_style is not None
        self.tool_style = tool_style or style_of(None if self.template is None else self.template.source)

    def check_tools(self) -> None:
        """Raises ConfigError for a chat template that writes calls in a style that is not read, unless one is given."""
        asked: list[Message] = [{"role": "user", "content": "a"}]
        call = {"id": "call00000", "type": "function", "function": {"name": DUMMY, "arguments": {"a": "a"}}}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        if self.template is None or self._is_style_given:
            return
        before, whole = self._tried(asked, tools=[_TOOL]), self._tried([*asked, calling], tools=[_TOOL])
        if whole is None:
            return  # it writes no calls: the policy is told how to
        said = whole.removeprefix(before or "")
        said = said.partition(self.template.ending)[0] if self.template.ending else said
        if not any(call.name == DUMMY for call in parse(said, self.tool_style).calls):
            raise ConfigError(
                f"environment: the chat template of '{self.encoder.name}' writes calls of tools in a style that is not "
                f"known: {said.strip()[:80]!r}; give another template as tokenizer.chat_template; with kind tools you "
                "may set tool_style to the style in which the policy is to write them"
            )

    @cached_property
    def writes_tools(self) -> bool:
        """Whether the chat template writes the variable `tools`."""
        if self.template is None:
            return False
        return DUMMY in (self._tried([{"role": "user", "content": "a"}], tools=[_TOOL]) or "")

    @cached_property
    def knows_results(self) -> bool:
        """Whether the chat template takes the result of a tool after a turn of the assistant."""
        asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}
        call = {"id": "call00000", "type": "function", "function": {"name": "a", "arguments": {"a": "a"}}}
        result = {"role": "tool", "name": "a", "tool_call_id": "call00000", "content": DUMMY}
        turns = (said, {**said, "content": "", "tool_calls": [call]})
        return self.template is not None and any(DUMMY in (self._tried([asked, turn, result]) or "") for turn in turns)

    @cached_property
    def knows_thoughts(self) -> bool:
        """Whether the chat template treats the text before `</think>` in another way than the rest."""
        return self.template is not None and "</think>" in self.template.source

    @cached_property
    def _stripped(self) -> str | None:
        """The characters that the template leaves out between a thought and the answer; None for all white space."""
        texts = [self._with_answer(f"<think>\na\n</think>{gap}{DUMMY}").partition(DUMMY)[0] for gap in ("", "\n \n")]
        return {"\n \n": "", " \n": "\n"}.get(texts[1].removeprefix(texts[0]))

    def _with_answer(self, content: str) -> str:
        asked = {"role": "user", "content": "a"}
        return self._tried([asked, {"role": "assistant", "content": content}, asked]) or ""

    def _tried(self, messages: Sequence[Message], **variables: Any) -> str | None:
        assert self.template is not None
        try:
            return self.template.text(messages, open_reply=True, variables={**self.variables, **variables})
        except RenderingError:
            return None

    def end(self, behind: str, *, is_call: bool) -> tuple[int, str]:
        """(place, text) of the end of a turn in the text that the template writes after its words.

        `is_call`: the template wrote a call in place of the words, so that its rest comes first.
        """
        assert self.template is not None
        ending = self.template.ending
        place = behind.find(ending) if ending else -1
        is_own = place >= 0 and (is_call or not behind[:place].strip())  # or else a later turn's
        return (place, ending) if is_own else (0, "")

    def ends(self, text: str, last_mark: str, finish: Finish) -> bool:
        """Whether a turn of the policy has its end, or another end of sequence in its place.

        `last_mark`: the special token with which it ends.
        """
        ending = self.template.ending if self.template is not None else ""
        if not ending:
            return False
        is_written = text.endswith(ending) or text.removesuffix(last_mark).endswith(ending)
        return is_written or (finish is Finish.EOS and ending.endswith(self.encoder.marks))

    def text(self, before: Sequence[int], token_ids: Sequence[int]) -> str:
        """What the policy wrote, special tokens included. `before`: the ids before it, or `end_of_prompt` of them."""
        return decode_behind(
            self.tokenizer, end_of_prompt(self.tokenizer, before), token_ids, skip_special_tokens=False
        )

    def visible_text(self, before: Sequence[int], token_ids: Sequence[int]) -> str:
        """What the policy wrote, without special tokens but those of a call, and without the end of its turn."""
        text = self.text(before, [token for token in token_ids if token not in self._hidden])
        ending = self.template.ending if self.template is not None else ""
        return text.removesuffix(ending) if ending else text

    @cached_property
    def _hidden(self) -> frozenset[int]:
        kept = {*marks_of(self.tool_style), "<think>", "</think>"}
        added = {index for index, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return frozenset({*added, *self.tokenizer.all_special_ids}) - {
            index for index, text in self.added_tokens.items() if text in kept
        }

    @cached_property
    def added_tokens(self) -> Mapping[int, str]:
        """The texts of tokens that are split off before the rest is tokenised, special ones among them."""
        return {index: token.content for index, token in self.tokenizer.added_tokens_decoder.items()}

    def place_behind(self, token_ids: Sequence[int]) -> Place:
        """What a text after these ids follows, as `TextEncoder.placed` asks."""
        return self.added_tokens.get(token_ids[-1]) if token_ids else ""

    def answer(self, before: Sequence[int], token_ids: Sequence[int], text: str) -> tuple[str, tuple[int, ...]]:
        """What the template keeps of a turn whose thought it leaves out: the rest of a token, and the ids after it.

        `text`: that of `text(before, token_ids)`. The answer begins after the last thought and the white space that the
        template leaves out. The rest is "" where that is a border of tokens.
        """
        thought = text.rfind("</think>")
        start = thought + len("</think>") if thought >= 0 else 0
        position = len(text) - len(text[start:].lstrip(self._stripped))
        known = end_of_prompt(self.tokenizer, before)

        def begun(count: int) -> str:
            return decode_behind(self.tokenizer, known, token_ids[:count], skip_special_tokens=False)

        low, high = 0, len(token_ids)  # the fewest tokens with that many whole characters
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if len(begun(middle)) >= position else (middle + 1, high)
        rest = begun(low)[position:]
        while rest.endswith(UNFINISHED) and low < len(token_ids):  # the next token completes the character
            low += 1
            rest = begun(low)[position:]
        return rest, tuple(token_ids[low:])

    def shortened(self, messages: Sequence[Message]) -> tuple[list[Message], int]:
        """The messages of one answer within `max_observation_tokens`, and how many of them were cut.

        Their beginning and their end stay, where tools and programs say what they did and how it ended. If all together
        are too long, each may have an equal share. The mark in the middle does not count.
        """
        limit = self.max_observation_tokens
        if limit is None or self._fits([str(message["content"]) for message in messages], limit):
            return list(messages), 0
        share = max(1, limit // len(messages))
        shorter: list[Message] = [
            {**message, "content": self._cut(str(message["content"]), share)} for message in messages
        ]
        return shorter, sum(new != old for new, old in zip(shorter, messages, strict=True))

    def _fits(self, contents: Sequence[str], limit: int) -> bool:
        num_characters = sum(map(len, contents))
        if num_characters <= limit and all(map(str.isascii, contents)):
            return True  # an ASCII character is one token at most
        if num_characters > limit * self._longest_token:
            return False  # whatever its tokens are
        return sum(map(len, self.encoder.placed([(text, None) for text in contents]))) <= limit

    def _cut(self, text: str, limit: int) -> str:
        most = limit * self._longest_token
        start, end = text[:most], text[-most:]
        first, last = self.encoder.placed([(start, None), (end, None)])
        if len(text) <= most and len(first) <= limit:
            return text
        head = decode(self.tokenizer, first[: (limit + 1) // 2]).rstrip(UNFINISHED)
        tail = decode(self.tokenizer, last[len(last) - limit // 2 :]).lstrip(UNFINISHED)
        return f"{head}\n[... {len(text) - len(head) - len(tail)} characters left out ...]\n{tail}"

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token, at least."""
        return max(map(len, self.tokenizer.get_vocab()))


def _dated(tokenizer: "PreTrainedTokenizerBase", now: datetime) -> "PreTrainedTokenizerBase":
    """A copy of the tokenizer whose chat template writes this date; the tokenizer itself if it writes none."""

    def dated(template: str) -> str:
        return _DATE.sub(lambda found: json.dumps(now.strftime(found[2])), template)

    given = tokenizer.chat_template
    new = {name: dated(text) for name, text in given.items()} if isinstance(given, dict) else given and dated(given)
    if new == given:
        return tokenizer
    tokenizer = copy(tokenizer)
    tokenizer.chat_template = new
    return tokenizer
