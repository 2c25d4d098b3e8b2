"""Finds the program in an answer: a fenced block, the whole text, or the completion of a prompt.

The text comes from a model, so every search takes linear time.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Which = Literal["last_block", "first_block", "all_blocks", "response", "completion"]

PYTHON = frozenset({"python", "py", "python3", "py3"})
OPENING = re.compile(r"(?P<fence>`{3,}|~{3,})[ \t]*\{?\.?(?P<tag>[\w+-]*)\}?[ \t]*$")
"""Matches a fence and its language at the end of a line."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a response, with its language."""

    tag: str
    """The language in lower case; empty if none is given."""
    text: str
    closed: bool


def program_of(
    text: str, which: Which, *, allow_unfenced: bool, prompt: str = "", function: str | None = None
) -> str | None:
    """The program that an answer gives, or None where there is none.

    Of fenced blocks those count that say Python; where none does, those that name no language; else all.
    `allow_unfenced` takes an answer without any block whole. For `completion` the last block, or the whole answer, goes
    on from `prompt`; an answer that defines `function` anew stands on its own, below what the prompt has before it.
    """
    text = text.replace("\r\n", "\n")
    if which == "response":
        program: str | None = text
    elif which == "completion":
        program = _completion(text, prompt.replace("\r\n", "\n"), function)
    else:
        program = _from_blocks(text, which, allow_unfenced=allow_unfenced)
    # Lone surrogates cannot be encoded, so they are replaced before the program is passed on.
    return program.encode("utf-8", "replace").decode() if program and program.strip() else None


def fenced_blocks(text: str) -> list[Block]:
    """The fenced blocks of a text, in order. The last is not closed if the text ends in it.

    A fence may follow other text on its line, and a closing fence may follow the last line of the program. A fence with
    a language inside a block begins the next block.
    """
    blocks: list[Block] = []
    lines: list[str] = []
    fence, tag, indent = "", "", 0
    for line in text.split("\n"):
        opening = _opening(line)
        if not fence:
            if opening:
                fence, tag, indent, lines = opening[1], opening[2], opening[0], []
            continue
        if opening and opening[1][0] == fence[0] and len(opening[1]) >= len(fence):
            lines += [opening[3]] if opening[3].strip() else []
            blocks.append(Block(tag, _joined(lines, indent), closed=True))
            fence, tag, indent, lines = (opening[1], opening[2], opening[0], []) if opening[2] else ("", "", 0, [])
            continue
        lines.append(line)
    if fence:
        blocks.append(Block(tag, _joined(lines, indent), closed=False))
    return blocks


def _opening(line: str) -> tuple[int, str, str, str] | None:
    """(indentation, fence, language, text before the fence) of a line that ends in a fence, else None."""
    start = max(line.rfind("```"), line.rfind("~~~"))
    while start > 0 and line[start - 1] == line[start]:
        start -= 1
    match = OPENING.match(line, start) if start >= 0 else None
    if match is None:
        return None
    before = line[:start]
    return (0 if before.strip() else len(before), match["fence"], match["tag"].lower(), before)


def _joined(lines: Sequence[str], indent: int) -> str:
    """The lines joined, without the indentation of their fence."""
    return "\n".join(line[indent:] if not line[:indent].strip() else line for line in lines)


def _from_blocks(text: str, which: Which, *, allow_unfenced: bool) -> str | None:
    blocks = [block for block in fenced_blocks(text) if block.text.strip()]
    if not blocks:
        return text if allow_unfenced else None
    python = [block for block in blocks if block.tag in PYTHON]
    chosen = python or [block for block in blocks if not block.tag] or blocks
    if which == "all_blocks":
        return "\n\n".join(block.text for block in chosen)
    return chosen[0 if which == "first_block" else -1].text


def _completion(text: str, prompt: str, function: str | None) -> str:
    body = _from_blocks(text, "last_block", allow_unfenced=True) or ""
    if function is None or _definition(body, function) is None:
        return prompt + body
    start = _definition(prompt, function)
    return f"{prompt[:start]}\n{body}"


def _definition(text: str, function: str) -> int | None:
    """The position of the top-level definition of a function; None if there is none."""
    match = re.search(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(function)}[ \t]*\(", text, re.MULTILINE)
    return match.start() if match else None
