"""Short tasks, to be answered under six rules at once, and the reward functions that check the rules."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from proximo.errors import ConfigError

TASKS = "data/instruct/self_instruct_seed_tasks.jsonl"
MOST_WORDS = 20
HELD_OUT_EVERY = 5
WORD = re.compile(r"[^\W_]+")


def rows(split: str = "train", *, path: str = TASKS) -> Iterator[dict[str, str]]:
    """`prompt`: each task of a split. Every fifth task is held out. The rules are the recipe's `data.system`.

    Raises ConfigError for a split other than `train` and `held_out`.
    """
    if split not in ("train", "held_out"):
        raise ConfigError(f"the split of the instructions is train or held_out, got {split!r}")
    for number, task in enumerate(tasks(Path(path))):
        if (number % HELD_OUT_EVERY == 0) == (split == "held_out"):
            yield {"prompt": task}


def tasks(path: Path) -> list[str]:
    """The instructions that need no input and have at most 20 words."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    texts = [
        " ".join(row["instruction"].split())
        for row in found
        if not any(instance["input"] for instance in row["instances"])
    ]
    return [text for text in texts if len(text.split()) <= MOST_WORDS]


def keeps(responses: Sequence[str], rule: str) -> list[dict[str, float]]:
    """1 for a response that keeps the rule. The component `kept` is 1 or 0.

    Two rules are hardly ever kept at first, so what leads there scores, too: half the share of capital letters, and a
    quarter each for a brace at the beginning and for the key.
    """
    return [_score(response, rule) for response in responses]


def _score(text: str, rule: str) -> dict[str, float]:
    kept = RULES[rule](text)
    return {"score": 1.0 if kept else NEARLY.get(rule, lambda _: 0.0)(text), "kept": float(kept)}


def is_json(text: str) -> bool:
    """Whether the text is a JSON object with the key `ANSWER` alone."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and list(found) == ["ANSWER"]


def is_short(text: str) -> bool:
    """One to eight words."""
    return 1 <= len(WORD.findall(text)) <= 8


def uses_because(text: str) -> bool:
    """Whether "because" is one of the words, in letters of either kind."""
    return "because" in words(text)


def avoids(text: str) -> bool:
    """At least three words, none of them "the", "a" or "and"."""
    return len(words(text)) >= 3 and not {"the", "a", "and"} & {*words(text)}


def is_capitals(text: str) -> bool:
    """At least three letters, and all of them capitals."""
    return sum(map(str.isalpha, text)) >= 3 and text == text.upper()


def exclaims(text: str) -> bool:
    """Whether there is one exclamation mark, after the last word."""
    return (
        re.search(r"[^\W_]", text) is not None
        and re.fullmatch(r"[^!]*[^\W_]\W*!\W*", text) is not None
        and text.count("!") == 1
    )


def share_of_capitals(text: str) -> float:
    """Half the share of the letters that are capitals."""
    letters = [letter for letter in text if letter.isalpha()]
    return 0.5 * sum(map(str.isupper, letters)) / max(1, len(letters))


def begun_json(text: str) -> float:
    """A quarter for a brace at the beginning, and one more for the key after it."""
    return 0.25 * text.startswith("{") + 0.25 * text.startswith('{"ANSWER":')


def words(text: str) -> list[str]:
    """The words of a text, in small letters."""
    return [word.lower() for word in WORD.findall(text)]


RULES: dict[str, Callable[[str], bool]] = {
    "json": is_json,
    "short": is_short,
    "use": uses_because,
    "avoid": avoids,
    "capitals": is_capitals,
    "exclaim": exclaims,
}
NEARLY: dict[str, Callable[[str], float]] = {"capitals": share_of_capitals, "json": begun_json}
"""Rule -> the score of a response that does not keep it; 0 for the other rules."""
