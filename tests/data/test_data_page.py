"""The examples of docs/data.md load as the page says, and its chat template is the one that is shipped."""

import json
import re
from pathlib import Path

import pytest
import yaml

from builders import tiny_tokenizer
from chat_families import PLAIN_CHAT_TEMPLATE
from proximo.data.examples import ExampleOptions, load_text_examples
from proximo.data.labelled import LabelledOptions, load_labelled_responses
from proximo.data.preferences import PairOptions, load_preference_pairs
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.readers.problems import as_problem
from proximo.data.rows import Row
from proximo.data.step_examples import StepOptions, load_step_examples
from tool_templates import TOOL_FAMILIES

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(
    r"<!-- (prompts|problems|texts|pairs|labelled|steps|chat|tools) -->\n```json\n(.*?)```", PAGE, flags=re.DOTALL
)


@pytest.mark.parametrize(("kind", "block"), EXAMPLES)
def test_every_example_of_the_page_loads(kind: str, block: str) -> None:
    # Each row alone: a block may show several forms.
    for line in block.strip().split("\n"):
        rows = [Row(source="page", number=1, values=json.loads(line))]
        match kind:
            case "prompts":
                loaded, _ = load_prompts(rows, tiny_tokenizer(), PromptOptions())
            case "problems":
                loaded, _ = load_prompts([as_problem(rows[0], "gsm8k")], tiny_tokenizer(), PromptOptions())
                assert loaded[0].answer == "7"
            case "texts":
                loaded, _ = load_text_examples(rows, tiny_tokenizer(), ExampleOptions())
            case "chat":
                loaded, _ = load_text_examples(rows, tiny_tokenizer(), ExampleOptions(as_messages=True))
            case "tools":
                loaded, _ = load_text_examples(rows, TOOL_FAMILIES["llama 3.1"].tokenizer(), ExampleOptions())
            case "labelled":
                loaded, _ = load_labelled_responses(rows, tiny_tokenizer(), LabelledOptions(max_tokens=64))
            case "steps":
                loaded, _ = load_step_examples(rows, tiny_tokenizer(), StepOptions())
            case _:
                loaded, _ = load_preference_pairs(rows, tiny_tokenizer(), PairOptions())
        assert len(loaded) == 1


def test_the_page_shows_each_kind() -> None:
    kinds = [kind for kind, _ in EXAMPLES]
    wanted = {"prompts": 2, "problems": 1, "texts": 2, "pairs": 1, "labelled": 1, "steps": 1, "chat": 1, "tools": 1}
    assert {kind: kinds.count(kind) for kind in set(kinds)} == wanted


def test_the_plain_template_of_the_page_is_the_one_that_is_shipped() -> None:
    block = re.search(r"```yaml\n(tokenizer:.*?)```", PAGE, flags=re.DOTALL)
    assert block is not None
    conversation = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    renderings = []
    for template in (yaml.safe_load(block[1])["tokenizer"]["chat_template"], PLAIN_CHAT_TEMPLATE):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        renderings.append(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
    assert renderings[0] == renderings[1] == "s\n\nHuman: u\n\nAssistant: a<eos>\n\nAssistant:"
