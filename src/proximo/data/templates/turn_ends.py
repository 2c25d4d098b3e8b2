"""Finds the end of an assistant's turn in the text that a template puts after its words."""

import re
from collections.abc import Sequence
from itertools import takewhile


def end_of_turn(last: str, inner: str | None, marks: Sequence[str], eos: str) -> str:
    """The end of an assistant's turn in the text that a template puts after its words.

    `last`: the text after the last turn. `inner`: the text after an earlier turn, with the next turn; None if refused.

    The end is the first special token with those that follow it directly; if the EOS follows after white space only,
    the end includes it. Text that the template puts only after the last turn ends the conversation instead of the turn.
    Without a special token, the end is all text after the last turn, stripped.
    """
    runs = runs_of_marks(last, marks, eos)
    if not runs:
        return last.strip()
    start, end = runs[0]
    for place, run in runs[1:]:
        if last[start + len(end) : place].strip():
            break
        end = last[start : place + len(run)]
    both = _pieces(end, marks)
    if inner is not None and (others := runs_of_marks(inner, marks, eos)):
        shared = zip(both, _pieces(inner[others[0][0] :], marks), strict=False)
        both = [piece for piece, _ in takewhile(lambda pair: pair[0] == pair[1], shared)] or both
    if eos in both:
        return "".join(both[: both.index(eos) + 1])
    return "".join(takewhile(lambda piece: piece in marks, both))


def runs_of_marks(text: str, marks: Sequence[str], eos: str) -> list[tuple[int, str]]:
    """(place, text) of each run of adjacent special tokens; an EOS ends a run."""
    runs: list[tuple[int, str]] = []
    place = 0
    for piece in _pieces(text, marks):
        if piece in marks:
            start, run = runs[-1] if runs else (0, "")
            if run and start + len(run) == place and not run.endswith(eos):
                runs[-1] = (start, run + piece)
            else:
                runs.append((place, piece))
        place += len(piece)
    return runs


def _pieces(text: str, marks: Sequence[str]) -> list[str]:
    """The special tokens of a text, the longest match at each place, and the text between them."""
    spelled = "|".join(map(re.escape, marks))
    return [piece for piece in re.split(f"({spelled})", text) if piece] if marks else [text]
