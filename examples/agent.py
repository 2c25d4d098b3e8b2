"""An agent that guesses a number from 1 to 9 in four turns. It knows only the address of a model: see agent.yaml."""

import json
import random
import re
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

MAX_TURNS = 4


def run(base_url: str, row: Mapping[str, Any], seed: int) -> dict[str, float]:
    """Play one game. The reward is 1 for the number, and less by a tenth for each turn that it took."""
    number = row.get("number") or random.Random(seed).randint(1, 9)
    messages = [{"role": "user", "content": "Guess my number from 1 to 9."}]
    for turn in range(MAX_TURNS):
        said = ask(base_url, messages)
        guess = int((re.findall("[1-9]", said) or ["0"])[0])
        if guess == number:
            return {"reward": 1.0 - 0.1 * turn, "won": 1.0}
        hint = "higher" if guess < number else "lower"
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": hint}]
    return {"reward": 0.0, "won": 0.0}


def ask(base_url: str, messages: Sequence[Mapping[str, str]]) -> str:
    """What the model answers. `OpenAI(base_url=base_url, api_key="none")` does the same."""
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]["content"] or ""
