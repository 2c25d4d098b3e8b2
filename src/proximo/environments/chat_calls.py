"""OpenAI's chat interface over calls of the policy: messages become ids, and ids messages.

What the policy wrote is never tokenised again: messages that go on after an answer of the same trajectory are put
behind its own ids. Any other messages, such as a shortened history, are rendered anew, and the trajectory forks.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response

from proximo.data.codec import decode, response_text
from proximo.data.formats.messages import messages_cell, tools_cell
from proximo.data.rows import Row
from proximo.environments.call_requests import (
    FINISH_REASONS,
    SampledCall,
    Vocabulary,
    logprobs_of,
    refused,
    request_id,
    sampling_of,
)
from proximo.environments.engine import Dialogue
from proximo.environments.environment import Observation
from proximo.environments.recorder import Recording
from proximo.errors import DataError, ModelError
from proximo.records import Message
from proximo.rollout.session import ModelCall

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedTurn:
    """What the policy wrote, as a message for a client."""

    content: str
    calls: tuple[Mapping[str, Any], ...] = ()
    """Calls of tools, in the form of chat templates: `function` with `name` and `arguments`, an object."""
    num_malformed: int = 0


@dataclass(kw_only=True, eq=False, slots=True)
class Conversation:
    """A conversation of a trajectory, as messages and as ids."""

    messages: list[Message]
    """All that the policy has read, and its last answer if that was given."""
    tools: Tools
    dialogue: Dialogue
    answer: ModelCall | None = None
    """What the policy wrote last; None while it is asked."""

    def is_asked(self, messages: Sequence[Message], tools: Tools) -> bool:
        """Whether the policy is asked just this: a client tries again."""
        return self.answer is None and tools == self.tools and _same(messages, self.messages)

    def goes_on_with(self, messages: Sequence[Message], tools: Tools) -> Sequence[Message]:
        """The messages that follow its last answer, which are others than the policy's; none if they do not fit."""
        known = len(self.messages)
        if self.answer is None or tools != self.tools or not _same(messages[:known], self.messages):
            return ()
        new = messages[known:]
        return () if any(message["role"] == "assistant" for message in new) else new


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatCall(SampledCall):
    """What a client asks of one call in messages."""

    conversation: Conversation
    new: Sequence[Message]
    """The messages that the trajectory has not had before."""
    parses_tools: bool
    streams: bool
    with_usage: bool
    """The stream ends with the usage."""
    with_logprobs: bool
    with_token_ids: bool


@dataclass(frozen=True, kw_only=True)
class ChatCalls:
    """Reads requests in messages and writes their answers, for the policy's tokenizer and chat template."""

    tokenizer: "PreTrainedTokenizerBase"
    """Of the server alone: a tokenizer is for one thread."""
    begin: Callable[[Observation, Tools | None], Dialogue]
    """Begins a conversation: messages and JSON schemas of tools -> its dialogue."""
    parse: Callable[[str, Tools], ParsedTurn]
    """Finds calls of these tools in what the policy wrote."""
    vocabulary: Vocabulary

    def read(self, recording: Recording, body: Mapping[str, Any]) -> ChatCall:
        """A request of `/v1/chat/completions`. Raises RefusedCallError."""
        row = Row(source="request", number=1, values=_with_known_roles(body))
        try:
            messages, tools = list(messages_cell(row, "messages")), tools_cell(row)
        except (DataError, KeyError) as error:
            raise refused(str(error)) from None
        _refuse_forms(body)
        max_new_tokens, ignored = sampling_of(body, recording.options, self.vocabulary)
        conversation, new = self._conversation(recording, messages, tools)
        stream = body.get("stream_options") or {}
        return ChatCall(
            token_ids=conversation.dialogue.prompt_ids,
            max_new_tokens=max_new_tokens,
            ignored=ignored,
            conversation=conversation,
            new=new,
            parses_tools=bool(tools) and body.get("tool_choice") != "none",
            streams=bool(body.get("stream")),
            with_usage=isinstance(stream, Mapping) and bool(stream.get("include_usage")),
            with_logprobs=bool(body.get("logprobs")),
            with_token_ids=bool(body.get("return_token_ids")),
        )

    def _conversation(
        self, recording: Recording, messages: list[Message], tools: Tools
    ) -> tuple[Conversation, Sequence[Message]]:
        """The conversation that the messages are of, and those that are new in it."""
        for known in reversed(recording.conversations):
            if known.is_asked(messages, tools):
                return known, messages
            if new := known.goes_on_with(messages, tools):
                assert known.answer is not None, "only an answer is gone on from"
                known.dialogue.answered(known.answer.token_ids, known.answer.finish, new)
                known.messages, known.answer = messages, None
                return known, new
        try:
            dialogue = self.begin(messages, tools or None)
        except (DataError, ModelError) as error:
            raise refused(str(error)) from None
        conversation = Conversation(messages=messages, tools=tools, dialogue=dialogue)
        recording.conversations.append(conversation)
        return conversation, messages

    def reply(self, recording: Recording, asked: ChatCall, call: ModelCall, model: str) -> Response:
        """Note an answered call, and write its reply."""
        text = asked.conversation.dialogue.turn_text(call.token_ids, call.finish)
        turn = self.parse(text, asked.conversation.tools) if asked.parses_tools else ParsedTurn(content=text)
        recording.note(call, list(asked.new), text)
        recording.tool_calls = len(turn.calls), turn.num_malformed
        calls = [{"id": f"call{recording.num_calls:03}{number:02}", **each} for number, each in enumerate(turn.calls)]
        said: Message = {"role": "assistant", "content": turn.content} | ({"tool_calls": calls} if calls else {})
        asked.conversation.messages = [*asked.conversation.messages, said]
        asked.conversation.answer = call
        body = _completion(asked, call, said, model)
        if not asked.streams:
            return JSONResponse(body)
        return Response(_events(body, with_usage=asked.with_usage), media_type="text/event-stream")

    def note_ids(self, recording: Recording, call: ModelCall) -> None:
        """Note an answered call whose prompt came as ids."""
        prompt = call.request.token_ids
        known = None if recording.trajectory is None else recording.trajectory.num_known(prompt)
        new = decode(self.tokenizer, prompt[known or 0 :])
        recording.note(call, new, response_text(self.tokenizer, prompt, call.token_ids))


def _with_known_roles(body: Mapping[str, Any]) -> dict[str, Any]:
    """The request with OpenAI's newer name of the system's role replaced."""
    given = body.get("messages")
    if not isinstance(given, list):
        raise refused("messages must be a list of messages")
    renamed = [
        {**each, "role": "system"} if isinstance(each, dict) and each.get("role") == "developer" else each
        for each in given
    ]
    return {"messages": renamed, "tools": body.get("tools")}


def _refuse_forms(body: Mapping[str, Any]) -> None:
    """Raises RefusedCallError for what an answer of the policy cannot promise."""
    form = body.get("response_format")
    if isinstance(form, Mapping) and form.get("type") not in (None, "text"):
        raise refused(f"response_format {form.get('type')!r:.40} is not served: the policy writes text")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise refused("tool_choice must be auto or none: the policy decides whether it calls a tool")


def _same(one: Sequence[Message], other: Sequence[Message]) -> bool:
    """Whether messages say the same. Clients drop or add white space and keys of their own."""
    return len(one) == len(other) and all(_said(a) == _said(b) for a, b in zip(one, other, strict=True))


def _said(message: Message) -> tuple[Any, ...]:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["role"], message["content"].strip(), calls


def _completion(asked: ChatCall, call: ModelCall, said: Message, model: str) -> dict[str, Any]:
    calls = said.get("tool_calls")
    message = {"role": "assistant", "content": said["content"] or (None if calls else "")}
    if calls:
        message["tool_calls"] = [_with_text(each) for each in calls]
    reason = FINISH_REASONS[call.finish]
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls" if calls and reason == "stop" else reason,
        "logprobs": {"content": logprobs_of(call)} if asked.with_logprobs else None,
    }
    read, wrote = len(call.request.token_ids), len(call.token_ids)
    body = {
        "id": request_id(call),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote},
    }
    if asked.with_token_ids:
        choice["token_ids"] = list(call.token_ids)
        body["prompt_token_ids"] = list(call.request.token_ids)
    return body


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call with its arguments as JSON text, as clients read it."""
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {"id": call["id"], "type": "function", "function": {**call["function"], "arguments": arguments}}


def _events(body: Mapping[str, Any], *, with_usage: bool) -> bytes:
    """A completion as a stream of events: the message in one piece, then why it ended."""
    choice = body["choices"][0]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(delta["tool_calls"])]
    first = {"index": 0, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    head = {**body, "object": "chat.completion.chunk", "usage": None}
    chunks = [{**head, "choices": [each]} for each in (first, last)]
    if with_usage:
        chunks.append({**head, "choices": [], "usage": body["usage"]})
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join((*lines, "data: [DONE]\n\n")).encode()
