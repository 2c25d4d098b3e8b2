"""Fine-tuning and preference data with turns of tools have the ids that a policy reads and writes in an episode."""

import json
from itertools import groupby
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase, Qwen2Tokenizer

from proximo.data.examples import ExampleOptions, load_text_examples
from proximo.data.preferences import PairOptions, load_preference_pairs
from proximo.data.rows import Row
from proximo.environments.dialogue import Dialogue
from proximo.environments.turn_renderer import TurnRenderer
from proximo.records import Finish
from real_data import real_data
from turn_templates import TURN_FAMILIES

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


def called(number: int) -> dict[str, Any]:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": "add", "arguments": {"a": [number, 2]}}}


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "name": "add", "tool_call_id": f"call0000{number}", "content": f"{number + 2}"}


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


ASK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Add 1 and 2, and 2 and 2."}]
TWO = [said("", tool_calls=[called(1), called(2)]), result(1), result(2), said("3 and 4.")]
ONE = [said("", tool_calls=[called(1)]), result(1), said("3.")]
MORE = [{"role": "user", "content": "And 3 and 2?"}, said("", tool_calls=[called(3)]), result(3), said("5.")]
WRITTEN = f"<think>\nhm\n</think>\n\n<tool_call>\n{json.dumps(called(1)['function'])}\n</tool_call>"
TALKS = {
    "qwen 2.5": [*ASK, *TWO, *MORE],
    "llama 3": [*ASK, *ONE, *MORE],
    "mistral": [*ASK[1:], *TWO],
    "qwen 3": [*ASK, said(WRITTEN), result(1), result(2), said("<think>\noh\n</think>\n\n3 and 4.")],
}


def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    if name == "qwen 2.5":
        return Qwen2Tokenizer.from_pretrained(real_data("tokenizers", "qwen2.5"))
    return TURN_FAMILIES[name].tokenizer("the add call is 1234")


@pytest.mark.parametrize("name", TALKS)
def test_an_episode_reads_and_writes_what_fine_tuning_and_preferences_teach(name: str) -> None:
    tokenizer, talk = tokenizer_of(name), TALKS[name]
    values = {"messages": talk, "tools": [TOOL]}
    (example,), _ = load_text_examples([Row(source="a", number=1, values=values)], tokenizer, ExampleOptions())
    first = next(place for place, message in enumerate(talk) if message["role"] == "assistant")
    answers = [
        list(group) for is_policy, group in groupby(talk[first:], lambda m: m["role"] == "assistant") if not is_policy
    ]
    dialogue = Dialogue(TurnRenderer(tokenizer), talk[:first], tools=[TOOL])
    marked = enumerate(example.loss_mask)
    turns = [[place for place, _ in group] for is_learned, group in groupby(marked, lambda m: m[1]) if is_learned]
    assert len(turns) == len(answers) + 1
    for turn, answer in zip(turns, [*answers, None], strict=True):
        assert dialogue.prompt_ids == example.token_ids[: turn[0]]
        if answer is not None:
            dialogue.answered([example.token_ids[place] for place in turn], Finish.EOS, answer)
    assert turns[-1][-1] == len(example.token_ids) - 1

    pair = {"prompt": talk[:first], "chosen": talk[first:], "rejected": [said("No.")], "tools": [TOOL]}
    options = PairOptions(learned="responses")
    (preference,), _ = load_preference_pairs([Row(source="a", number=1, values=pair)], tokenizer, options)
    assert preference.prompt_token_ids + preference.chosen_token_ids == example.token_ids
    assert (False,) * len(preference.prompt_token_ids) + (preference.chosen_mask or ()) == example.loss_mask
