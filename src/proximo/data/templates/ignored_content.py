"""Names the content of a conversation that its chat template ignores: what the template's source does not mention."""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports torch, which a dry run does without
    from proximo.records import Message

_REASONING = frozenset(("reasoning_content", "thinking", "reasoning"))
"""Names of a message's reasoning; transformers renders each of them under the first two."""
_READ = {"role", "content", "weight", "tool_calls"}
_READ_OF_TOOLS = {"name", "tool_call_id"}


def unread(source: str, messages: Iterable["Message"], variables: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of messages, and the variables besides tools, that the template `source` ignores."""
    messages, words = list(messages), _words(source)
    keys = {key for message in messages for key in message.keys() - _READ}
    keys -= _READ_OF_TOOLS - {key for message in messages if message["role"] != "tool" for key in message}
    found = [f"message key '{key}'" for key in sorted(keys) if key not in (words if key.isidentifier() else source)]
    if (options := variables.keys() - {"tools"}) and not options & words:
        found.append("column 'chat_template_kwargs'")
    if any(message.get("weight") and message["role"] != "assistant" for message in messages):
        found.append("weight of a turn that is not the assistant's")
    return tuple(found)


@lru_cache(maxsize=64)
def _words(source: str) -> frozenset[str]:
    words = frozenset(re.findall(r"\w+", source))
    return words | _REASONING if words & {"reasoning_content", "thinking"} else words
