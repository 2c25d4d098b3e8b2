"""Templates in the manner of many families, through every use: prompts, pairs, fine-tuning, a reward model's reading.

The oracle is `apply_chat_template` of transformers.
"""

import json
import re
from types import SimpleNamespace

import pytest

from chat_families import FAMILIES, QWEN_3, Family
from proximo.data.examples import ExampleOptions, load_text_examples
from proximo.data.preferences import PairOptions, load_preference_pairs
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.rendering import render_for
from proximo.data.rows import Row
from proximo.data.templates.conversation_text import conversation_text
from proximo.data.tokenise import TextEncoder
from proximo.errors import ModelError
from proximo.records import Finish
from proximo.rollout.sampling import SamplingOptions
from proximo.rollout.stopping import StopRules, ending_ids

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
            tokens = json.dumps(tokenizer.special_tokens_map)
            rendered = conversation_text(family.template, tokens, [*system, *messages], open_reply=is_open)
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


def test_a_rollout_stops_where_fine_tuning_taught_a_turn_to_end(family: Family) -> None:
    tokenizer = family.tokenizer()
    example = load_text_examples(row(messages=[ASK, YES]), tokenizer, ExampleOptions())[0][0]
    learned = [token for token, counts in zip(example.token_ids, example.loss_mask, strict=True) if counts]
    ends = ending_ids(SimpleNamespace(generation_config=None), tokenizer)
    assert [token in ends for token in learned] == [False] * (len(learned) - 1) + [True]
    stop = StopRules(options=SamplingOptions(max_new_tokens=99), eos_token_ids=ends, tokenizer=tokenizer)
    assert [stop.finish(learned[:n], prompt_end=(), limit=99) for n in (len(learned) - 1, len(learned))] == [
        None,
        Finish.EOS,
    ]


def test_a_token_inside_a_turns_end_stops_no_rollout() -> None:
    """Even where the model's generation config lists it: the template says that the turn goes on."""
    tokenizer = FAMILIES["command a"].tokenizer()
    inner, last = tokenizer.convert_tokens_to_ids(["<|END_RESPONSE|>", "<|END_OF_TURN|>"])
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[inner, last]))
    assert ending_ids(model, tokenizer) == (last,)


def own_words(family: Family) -> list[str]:
    """Answers of up to three characters, and longer words, that the template says itself; and the oddest of others."""
    tokenizer = family.tokenizer()
    text = tokenizer.apply_chat_template([ASK, YES, ASK, YES], tokenize=False) if not family.rewrites else ""
    text += asked(family, [ASK]) + family.learned + "".join(family.marks) + family.eos
    pieces = {text[start : start + size] for start in range(len(text)) for size in (1, 2, 3)}
    return sorted(
        {*pieces, *re.findall(r"\w+", text), "", " ", "\n\n", " a ", "kvxqz", "kvxqzz", "yes kvxqz", "</think>"}
    )


def in_its_turn(family: Family, answer: str) -> str:
    """What is to be learned of an answer."""
    if family.template == QWEN_3 and answer == "</think>":  # it would be taken for the end of an empty thought
        return answer + family.eos
    return ended(family, family.learned.replace("yes", answer.strip() if family.trims else answer))


def test_of_an_answer_of_the_templates_own_words_all_is_learned(family: Family) -> None:
    tokenizer, answers = family.tokenizer(), own_words(family)
    assert len(answers) > 70
    turns = [{"role": "assistant", "content": answer} for answer in answers]
    rows = [Row(source="made", number=n, values={"messages": [ASK, turn]}) for n, turn in enumerate(turns, 1)]
    examples, _ = load_text_examples(rows, tokenizer, ExampleOptions())
    pairs, _ = load_preference_pairs(
        [
            Row(source="made", number=n, values={"prompt": [ASK], "chosen": [turn], "rejected": [YES]})
            for n, turn in enumerate(turns, 1)
            if turn != YES
        ],
        tokenizer,
        PairOptions(),
    )
    (given,), _ = load_prompts(row(messages=[ASK]), tokenizer, PromptOptions())
    chosen = iter(pairs)
    for answer, example in zip(answers, examples, strict=True):
        counted = [token for token, counts in zip(example.token_ids, example.loss_mask, strict=True) if counts]
        assert tokenizer.decode(counted) == in_its_turn(family, answer), repr(answer)
        assert example.token_ids == (*given.token_ids, *counted), repr(answer)
        # A word that only white space parts from "yes" makes no pair.
        if answer.strip() != "yes":
            assert next(chosen).chosen_token_ids == tuple(counted), repr(answer)
        assert render_for(TextEncoder(tokenizer), given, answer) == (given.token_ids, tuple(counted)), repr(answer)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.rewrites])
def test_of_earlier_answers_of_the_templates_own_words_all_is_learned(name: str) -> None:
    family = FAMILIES[name]
    tokenizer, answers = family.tokenizer(), [answer for answer in own_words(family) if len(answer) < 2]
    turns = [{"role": "assistant", "content": answer} for answer in answers]
    rows = [Row(source="made", number=n, values={"messages": [ASK, turn, ASK, NO]}) for n, turn in enumerate(turns, 1)]
    for answer, example in zip(answers, load_text_examples(rows, tokenizer, ExampleOptions())[0], strict=True):
        counted = [token for token, counts in zip(example.token_ids, example.loss_mask, strict=True) if counts]
        earlier = family.learned.replace("yes", answer.strip() if family.trims else answer)
        assert tokenizer.decode(counted) == earlier + ended(family, family.learned.replace("yes", "no")), repr(answer)
