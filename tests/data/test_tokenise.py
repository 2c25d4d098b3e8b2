"""One way to tokenise: the same ids wherever a text is met, BOS and EOS once, in parts and whole."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from builders import tiny_tokenizer
from proximo.data.examples import ExampleOptions, load_text_examples
from proximo.data.formats.prompt_response import Exchange
from proximo.data.preferences import PairOptions, load_preference_pairs
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.rendering import encode_exchanges, render_for
from proximo.data.rows import Row
from proximo.data.tokenise import TextEncoder
from proximo.errors import DataError, ModelError
from proximo.records import Prompt

TURNS = [
    {"role": "user", "content": "what is 2 plus 2?"},
    {"role": "assistant", "content": "\n\n 4."},
    {"role": "user", "content": "and 3 plus 3?"},
]
RESPONSE = "it is 6, of course."


def rows(*values: dict) -> list[Row]:
    return [Row(source="made", name="made", number=number, values=value) for number, value in enumerate(values, 1)]


def tokenizer_with_bos(*, template: str | None = None):
    """One that puts <bos> before and <eos> after a text by itself, like those of many models."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("as_messages", [False, True], ids=["text", "messages"])
@pytest.mark.parametrize(
    "prompt", ["the film is ", "q: is it good?\na:", "\n\n  odd   spaces\n", "d\u00e9j\u00e0 vu \U0001f642"]
)
def test_a_text_has_the_same_ids_in_every_part_of_the_pipeline(tokenizer, prompt: str, as_messages: bool) -> None:
    """Rollouts, fine-tuning, reward training and scoring: prompt ids are equal, and followed by the same response."""
    bos = {"system": "be kind."} if as_messages else {}
    asked = load_prompts(rows({"prompt": prompt}), tokenizer, PromptOptions(as_messages=as_messages, **bos))[0][0]
    learned = load_text_examples(
        rows({"prompt": prompt, "response": RESPONSE}), tokenizer, ExampleOptions(as_messages=as_messages, **bos)
    )[0][0]
    pair = load_preference_pairs(
        rows({"prompt": prompt, "chosen": RESPONSE, "rejected": "no."}),
        tokenizer,
        PairOptions(as_messages=as_messages, **bos),
    )[0][0]
    scored = render_for(TextEncoder(tokenizer), asked, RESPONSE)
    assert pair.prompt_token_ids == asked.token_ids == scored[0]
    assert pair.chosen_token_ids == scored[1]
    assert learned.token_ids == (*asked.token_ids, *scored[1])
    first_target = learned.loss_mask.index(True)
    assert first_target == len(asked.token_ids)
    assert all(learned.loss_mask[first_target:])


def test_a_conversation_has_the_same_ids_in_every_part_of_the_pipeline(tokenizer) -> None:
    reply = {"role": "assistant", "content": RESPONSE}
    asked = load_prompts(rows({"prompt": TURNS}), tokenizer, PromptOptions())[0][0]
    learned = load_text_examples(rows({"messages": [*TURNS, reply]}), tokenizer, ExampleOptions())[0][0]
    pair = load_preference_pairs(
        rows({"prompt": TURNS, "chosen": [reply], "rejected": [{**reply, "content": "7"}]}), tokenizer, PairOptions()
    )[0][0]
    scored = render_for(TextEncoder(tokenizer), asked, RESPONSE)
    assert learned.token_ids == (*asked.token_ids, *pair.chosen_token_ids)
    assert (pair.prompt_token_ids, pair.chosen_token_ids) == (asked.token_ids, scored[1])
    # A response that was cut has no end of turn.
    assert render_for(TextEncoder(tokenizer), asked, RESPONSE, finished=False) == (scored[0], scored[1][:-1])


def test_prompt_and_response_are_tokenised_apart(tokenizer) -> None:
    """The oracle is the tokenizer itself, called once per part."""
    _, encoded = encode_exchanges(TextEncoder(tokenizer), [Exchange(origin="", prompt="a: ", responses=("42", " b"))])
    for response, text in zip(encoded[0].responses, ("42", " b"), strict=True):
        assert list(encoded[0].prompt.ids) == tokenizer("a: ", add_special_tokens=False)["input_ids"]
        assert list(response.ids) == [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def test_characters_that_the_tokenizer_cannot_write_are_counted(real_tokenizers) -> None:
    text = {"prompt": "A café ß noir", "response": " oui…"}
    _, report = load_text_examples(rows(text), tiny_tokenizer(), ExampleOptions())
    assert report.unwritable == {"é": 1, "ß": 1, "…": 1}
    assert "the tokenizer cannot write 3 of the characters ('ß' 'é' '…'), which occur 3 times" in str(report)
    for name, tokenizer in real_tokenizers.items():
        _, report = load_prompts(rows(text), tokenizer, PromptOptions())
        assert not report.unwritable or name == "tiny_bpe"
    _, report = load_prompts(rows({"prompt": "plain"}), tiny_tokenizer(), PromptOptions())
    assert "cannot write" not in str(report)


def test_a_letter_that_stands_in_a_known_word_alone_is_not_lost() -> None:
    core = Tokenizer(models.WordLevel(vocab={"<unk>": 0, "word": 1, "one": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    _, report = load_prompts(rows({"prompt": "one word"}, {"prompt": "one other"}), words, PromptOptions())
    assert report.unwritable.keys() == {"h", "t"}


def test_boundaries_that_would_merge_are_counted(real_tokenizers) -> None:
    tokenizer = real_tokenizers["gpt2"]
    bad = {"prompt": "The answer is ", "response": "good"}  # " good" is one token
    good = {"prompt": "The answer is", "response": " good"}
    _, report = load_text_examples(rows(bad, good, good, bad, bad), tokenizer, ExampleOptions())
    assert (report.num_merged_boundaries, report.num_checked_boundaries) == (3, 5)
    assert "3 of 5 checked have other tokens as one text" in str(report)
    _, report = load_text_examples(rows(good), tokenizer, ExampleOptions())
    assert report.num_merged_boundaries == 0
    assert "as one text" not in str(report)


def test_the_count_of_merges_looks_at_an_even_sample(real_tokenizers) -> None:
    encoder = TextEncoder(real_tokenizers["gpt2"])
    exchanges = [
        Exchange(origin="", prompt="The answer is:" if index % 3 else "The answer is ", responses=("good",))
        for index in range(35)
    ]
    rendered, encoded = encode_exchanges(encoder, exchanges)
    # Every fourth is looked at; of 0, 4, ..., 32 the multiples of 3 are 0, 12 and 24.
    assert encoder.count_merges(rendered, encoded, limit=10) == (3, 9)


@pytest.mark.parametrize(
    ("prompt", "ids"), [("ab", (1, 6, 7)), ("<bos>ab", (1, 6, 7)), ("", (1,))], ids=["plain", "own bos", "empty"]
)
def test_the_bos_of_the_tokenizer_stands_once_before_a_text_and_its_eos_never_after_a_prompt(prompt, ids) -> None:
    asked = load_prompts(rows({"prompt": prompt}), tokenizer_with_bos(), PromptOptions())[0][0]
    assert asked.token_ids == ids


@pytest.mark.parametrize(("text", "ids"), [("ab", (1, 6, 7, 2)), ("<bos>ab<eos>", (1, 6, 7, 2))])
def test_plain_text_has_one_bos_and_one_eos(text, ids) -> None:
    example = load_text_examples(rows({"text": text}), tokenizer_with_bos(), ExampleOptions())[0][0]
    assert example.token_ids == ids
    assert example.loss_mask == (False, True, True, True)


def test_a_template_that_writes_the_bos_is_the_only_one_to_do_so() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    user = {"role": "user", "content": "ab"}
    for written, expected in ((template, (1, 6, 7, 2)), (template.replace("{{ bos_token }}", ""), (6, 7, 2))):
        tokenizer = tokenizer_with_bos(template=written)
        asked = load_prompts(rows({"messages": [user]}), tokenizer, PromptOptions())[0][0]
        assert asked.token_ids == expected
        # The template's own word, by the public way to ask it.
        assert list(expected) == tokenizer.apply_chat_template([user], return_dict=False)


def test_a_tokenizer_without_eos_is_refused_where_one_is_wanted() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match=r"has no end-of-sequence token.*set eos_token"):
        load_text_examples(rows({"text": "ab"}), tokenizer, ExampleOptions())


def test_a_prompt_of_ids_alone_cannot_be_rendered_for_another_tokenizer() -> None:
    with pytest.raises(DataError, match=r"prompt 'p7' has token ids only.*text or messages"):
        render_for(TextEncoder(tiny_tokenizer()), Prompt(id="p7", token_ids=(3,)), "x")


def test_rendering_for_another_tokenizer_gives_what_its_reward_model_was_trained_on(real_tokenizers) -> None:
    """The policy speaks Qwen, the reward model GPT-2 with the plain template: from messages, never from ids."""
    asked = load_prompts(rows({"prompt": TURNS}), real_tokenizers["qwen2.5"], PromptOptions())[0][0]
    prompt, response = render_for(TextEncoder(real_tokenizers["gpt2"]), asked, RESPONSE)
    text = real_tokenizers["gpt2"].decode(prompt + response)
    assert text == (
        "\n\nHuman: what is 2 plus 2?\n\nAssistant: \n\n 4.<|endoftext|>\n\nHuman: and 3 plus 3?"
        "\n\nAssistant: it is 6, of course.<|endoftext|>"
    )


def test_equal_texts_are_tokenised_once(monkeypatch) -> None:
    encoder = TextEncoder(tiny_tokenizer())
    seen = []
    call = TextEncoder._call
    monkeypatch.setattr(TextEncoder, "_call", lambda self, texts: seen.extend(texts) or call(self, texts))
    assert encoder.texts(["ab", "c", "ab", "ab"]) == [(6, 7), (8,), (6, 7), (6, 7)]
    assert seen == ["ab", "c"]
    assert encoder.texts([]) == []
