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
from proximo.environments.conversation import Conversation, words_of
from proximo.environments.dialogue import Dialogue
from proximo.environments.prompt_layout import Item
from proximo.environments.recorder import Recording
from proximo.environments.tool_calls import Tools, ToolStyle, ToolTurn, parse
from proximo.errors import ConfigError, DataError, ModelError
from proximo.records import Finish, Message
from proximo.rollout.sampling import SamplingOptions
from proximo.rollout.session import ModelCall

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatCall(SampledCall):
    """What a client asks of one call in messages."""

    conversation: Conversation
    messages: Sequence[Message]
    items: Sequence[Item]
    """The messages, with answers of the policy by their numbers."""
    body: Mapping[str, Any]
    """The request, which says how the answer is written."""


@dataclass(frozen=True, kw_only=True)
class ChatCalls:
    """Reads requests in messages and writes their answers, for the policy's tokenizer and chat template."""

    tokenizer: "PreTrainedTokenizerBase"
    """Of the server alone: a tokenizer is for one thread."""
    begin: Callable[[Sequence[Message], Tools], Dialogue]
    """Messages and JSON schemas of tools -> a dialogue. Raises ConfigError for tools whose calls would not be read."""
    style: ToolStyle
    """How the policy writes calls of tools."""
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
        try:
            conversation = self._conversation(recording, messages, tools)
            items = conversation.items(messages)
            conversation.dialogue.ask(items)
        except (ConfigError, DataError, ModelError) as error:
            raise refused(str(error)) from None
        return ChatCall(
            token_ids=conversation.dialogue.prompt_ids,
            max_new_tokens=max_new_tokens,
            ignored=ignored,
            conversation=conversation,
            messages=messages,
            items=items,
            body=body,
        )

    def _conversation(self, recording: Recording, messages: Sequence[Message], tools: Tools) -> Conversation:
        for known in recording.conversations:
            if known.tools == tools:
                return known
        recording.conversations.append(Conversation(tools=tools, dialogue=self.begin(messages, tools)))
        return recording.conversations[-1]

    def reply(self, recording: Recording, asked: ChatCall, call: ModelCall, model: str) -> Response:
        """Note an answered call, and write its reply."""
        conversation, dialogue = asked.conversation, asked.conversation.dialogue
        if dialogue.prompt_ids != asked.token_ids:
            dialogue.ask(asked.items)  # a request that was refused has asked something else meanwhile
        text = dialogue.turn_text(call.token_ids, call.finish)
        parses = bool(conversation.tools) and asked.body.get("tool_choice") != "none"
        turn = parse(text, self.style, conversation.tools) if parses else ToolTurn()
        answered = max((place for place, item in enumerate(asked.items) if isinstance(item, int)), default=-1)
        said = turn.message(_before_stop(text, call, recording.options))
        recording.note(call, asked.messages[answered + 1 :], text, said)
        recording.tool_calls = len(turn.calls), len(turn.malformed)
        number = dialogue.wrote(call.token_ids, call.finish)
        conversation.turns.append((tuple(map(words_of, (*asked.messages, said))), number))
        body = _completion(asked, call, said, model)
        if not asked.body.get("stream"):
            return JSONResponse(body)
        options = asked.body.get("stream_options")
        with_usage = isinstance(options, Mapping) and bool(options.get("include_usage"))
        return Response(_events(body, with_usage=with_usage), media_type="text/event-stream")

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


def _before_stop(text: str, call: ModelCall, options: SamplingOptions) -> str:
    """What the policy wrote before the stop string that ended it."""
    places = [place for string in options.stop_strings if (place := text.rfind(string)) >= 0]
    return text[: min(places)] if call.finish is Finish.STOP and places else text


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
        "logprobs": {"content": logprobs_of(call)} if asked.body.get("logprobs") else None,
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
    if asked.body.get("return_token_ids"):
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
