"""Templates in the manner of twelve families, through every use: prompts, pairs, fine-tuning, a reward model's reading.

The oracle is `apply_chat_template` of transformers.
"""

import pytest

from chat_families import FAMILIES, Family
from proximo.data.examples import ExampleOptions, load_text_examples
from proximo.data.preferences import PairOptions, load_preference_pairs
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.rendering import render_for
from proximo.data.rows import Row
from proximo.data.templates.chat import end_of_turn_ids
from proximo.data.templates.renderer import RENDERER
from proximo.data.tokenise import TextEncoder
from proximo.errors import ModelError

ASK = {"role": "user", "content": "is it?"}
YES, NO = ({"role": "assistant", "content": text} for text in ("yes", "no"))
THOUGHT = {"role": "assistant", "content": "<think>hm, so\n it is</think>yes"}
CONVERSATIONS = ([ASK], [ASK, YES], [ASK, YES, ASK], [ASK, THOUGHT, ASK], [ASK, NO, ASK, YES], [ASK, THOUGHT])


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def row(**values) -> list[Row]:
    return [Row(source="made", number=1, values=values)]


def asked(family: Family, messages: list) -> str:
    return family.tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def learned(family: Family, messages: list, train_on: str = "responses") -> tuple[str, str]:
    """(the whole text, the texts that count in the loss) of one conversation."""
    tokenizer = family.tokenizer()
    example = load_text_examples(row(messages=messages), tokenizer, ExampleOptions(train_on=train_on))[0][0]
    counted = [token for token, counts in zip(example.token_ids, example.loss_mask, strict=True) if counts]
    return tokenizer.decode(list(example.token_ids)), tokenizer.decode(counted)


def ended(family: Family, text: str) -> str:
    """With the EOS behind it, unless a special token ends it."""
    return text if text.endswith((*family.marks, family.eos)) else text + family.eos


def test_it_is_rendered_as_transformers_renders_it(family: Family) -> None:
    tokenizer = family.tokenizer()
    system = [{"role": "system", "content": "be kind"}] if family.has_system else []
    for messages in CONVERSATIONS:
        for is_open in (True, False):
            given = {"messages": [*system, *messages], "add_generation_prompt": is_open, "tools": None}
            rendered = RENDERER.render(family.template, {**tokenizer.special_tokens_map, **given})
            assert rendered == tokenizer.apply_chat_template(
                [*system, *messages], tokenize=False, add_generation_prompt=is_open
            )


@pytest.mark.parametrize("messages", [[ASK], [ASK, YES, ASK], [ASK, THOUGHT, ASK]])
def test_a_prompt_is_what_the_template_says(family: Family, messages: list) -> None:
    prompt = load_prompts(row(messages=messages), family.tokenizer(), PromptOptions())[0][0]
    assert TextEncoder(family.tokenizer()).text(prompt.token_ids) == asked(family, messages)


def test_a_pair_continues_the_prompt_that_a_policy_is_asked(family: Family) -> None:
    tokenizer = family.tokenizer()
    prompt = [ASK, YES, ASK]
    pair = load_preference_pairs(row(prompt=prompt, chosen=[YES], rejected=[NO]), tokenizer, PairOptions())[0][0]
    (given,), _ = load_prompts(row(messages=prompt), tokenizer, PromptOptions())
    assert pair.prompt_token_ids == given.token_ids
    assert tokenizer.decode(list(pair.chosen_token_ids)) == ended(family, family.learned)
    assert tokenizer.decode(list(pair.rejected_token_ids)) == ended(family, family.learned.replace("yes", "no"))


@pytest.mark.parametrize("text", ["yes", THOUGHT["content"]])
def test_a_reward_model_reads_what_it_was_trained_on(family: Family, text: str) -> None:
    tokenizer = family.tokenizer()
    prompt, said = [ASK, YES, ASK], {"role": "assistant", "content": text}
    pair = load_preference_pairs(row(prompt=prompt, chosen=[said], rejected=[NO]), tokenizer, PairOptions())[0][0]
    (given,), _ = load_prompts(row(messages=prompt), tokenizer, PromptOptions())
    assert render_for(TextEncoder(tokenizer), given, text) == (pair.prompt_token_ids, pair.chosen_token_ids)
    unfinished = render_for(TextEncoder(tokenizer), given, text, finished=False)[1]
    assert pair.chosen_token_ids[: len(unfinished)] == unfinished
    assert tokenizer.decode(list(unfinished)).endswith("yes")


def test_fine_tuning_learns_the_answer_and_its_end(family: Family) -> None:
    whole, counted = learned(family, [ASK, YES])
    assert counted == ended(family, family.learned)
    assert whole == asked(family, [ASK]) + counted


def test_of_several_turns_each_is_learned_or_the_last_alone(family: Family) -> None:
    messages = [ASK, YES, ASK, YES]
    whole, counted = learned(family, messages, "last_response")
    assert whole == asked(family, messages[:-1]) + ended(family, family.learned)
    assert counted == ended(family, family.learned)
    if family.rewrites:
        with pytest.raises(ModelError, match=r"made, row 1: .* renders message 2 in another way.*last_response"):
            learned(family, messages)
    else:
        assert learned(family, messages) == (whole, family.learned + ended(family, family.learned))
    assert learned(family, messages, "everything")[0] == whole


def test_a_rollout_stops_at_the_mark_that_fine_tuning_taught(family: Family) -> None:
    tokenizer = family.tokenizer()
    ids = {*end_of_turn_ids(TextEncoder(tokenizer)), tokenizer.eos_token_id}
    example = load_text_examples(row(messages=[ASK, YES]), tokenizer, ExampleOptions())[0][0]
    assert example.token_ids[-1] in ids
