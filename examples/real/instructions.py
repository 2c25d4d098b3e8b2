"""Short tasks, each with one of six rules that a program can check, and the reward functions that check them."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from proximo.errors import ConfigError

TASKS = "data/instruct/self_instruct_seed_tasks.jsonl"
MOST_WORDS = 20
HELD_OUT_EVERY = 5

RULES = {
    "json": 'Answer with a JSON object that has one key, "answer".',
    "short": "Answer in at most five words.",
    "use": 'Use the word "because".',
    "avoid": 'Do not use the words "the", "a" and "and".',
    "capitals": "Write in capital letters only.",
    "german": "Answer in German.",
}
WORD = re.compile(r"\w+")
FENCED = re.compile(r"\A```(?:json)?\n(.*)\n```\Z", re.DOTALL)
GERMAN = frozenset(
    "der die das den dem des ein eine einen einem und ist sind war zu von mit für auf im in nicht sich es ich sie er wir "
    "ihr als auch an wie bei aus nach oder über um wird kann haben hat werden wenn aber man noch zum zur".split()
)
ENGLISH = frozenset(
    "the a an of and to that for with it as on are this be by or your you can from have not at i is".split()
)


def rows(split: str = "train", *, path: str = TASKS) -> Iterator[dict[str, str]]:
    """`prompt` and `asked`, the rule that it asks for: every task with every rule. Every fifth task is held out.

    Raises ConfigError for a split other than `train` and `held_out`.
    """
    if split not in ("train", "held_out"):
        raise ConfigError(f"the split of the instructions is train or held_out, got {split!r}")
    for number, task in enumerate(tasks(Path(path))):
        if (number % HELD_OUT_EVERY == 0) == (split == "held_out"):
            for name, rule in RULES.items():
                yield {"prompt": f"{task} {rule}", "asked": name}


def tasks(path: Path) -> list[str]:
    """The instructions that need no input and have at most 20 words."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    texts = [
        " ".join(row["instruction"].split())
        for row in found
        if not any(instance["input"] for instance in row["instances"])
    ]
    return [text for text in texts if len(text.split()) <= MOST_WORDS]


def keeps(responses: Sequence[str], asked: Sequence[str], rule: str) -> list[dict[str, float] | None]:
    """Scores the responses to prompts that ask for `rule`; None for others. The component `kept` is 1 or 0.

    A response that keeps the rule scores 1. Of the two rules that the model never keeps at first, others score what
    leads there: half the share of capital letters, and a quarter each for a brace at the beginning and for the key.
    """
    return [_score(response, rule) if name == rule else None for response, name in zip(responses, asked, strict=True)]


def _score(text: str, rule: str) -> dict[str, float]:
    kept = KEPT[rule](text)
    return {"score": 1.0 if kept else NEARLY.get(rule, lambda _: 0.0)(text), "kept": float(kept)}


def share_of_capitals(text: str) -> float:
    """Half the share of the letters that are capitals."""
    letters = [letter for letter in text if letter.isalpha()]
    return 0.5 * sum(map(str.isupper, letters)) / max(1, len(letters))


def begun_json(text: str) -> float:
    """A quarter for a brace at the beginning, and one more for the key after it."""
    return 0.25 * text.startswith("{") + 0.25 * text.startswith('{"answer":')


def is_json(text: str) -> bool:
    """Whether the text, or all of it in a fenced block, is a JSON object with the key `answer` alone."""
    fenced = FENCED.match(text.strip())
    try:
        found = json.loads(fenced.group(1) if fenced else text)
    except ValueError:
        return False
    return isinstance(found, dict) and list(found) == ["answer"]


def is_short(text: str) -> bool:
    """One to five words."""
    return 1 <= len(WORD.findall(text)) <= 5


def uses_because(text: str) -> bool:
    """Whether "because" is one of the words."""
    return "because" in words(text)


def avoids(text: str) -> bool:
    """At least three words, none of them "the", "a" or "and"."""
    return len(words(text)) >= 3 and not {"the", "a", "and"} & {*words(text)}


def is_capitals(text: str) -> bool:
    """At least three letters, and all of them capitals."""
    return sum(map(str.isalpha, text)) >= 3 and text == text.upper()


def is_german(text: str) -> bool:
    """At least two of the commonest German words, and more of them than of the commonest English ones."""
    num_german = sum(word in GERMAN for word in words(text))
    return num_german >= 2 and num_german > sum(word in ENGLISH for word in words(text))


def words(text: str) -> list[str]:
    """The words of a text, in small letters."""
    return [word.lower() for word in WORD.findall(text)]


KEPT = {
    "json": is_json,
    "short": is_short,
    "use": uses_because,
    "avoid": avoids,
    "capitals": is_capitals,
    "german": is_german,
}
NEARLY = {"capitals": share_of_capitals, "json": begun_json}
"""Rule -> the score of a response that does not keep it; 0 for the other rules."""
