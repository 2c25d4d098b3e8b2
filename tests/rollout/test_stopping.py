"""Responses end where they should, and their text is cut where it should be."""

import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from builders import tiny_tokenizer
from proximo.data.codec import decode_behind, end_of_prompt
from proximo.records import Finish
from proximo.rollout.sampling import SamplingOptions
from proximo.rollout.stopping import StopRules
from tokenizer_kinds import KINDS, legacy


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, some merges and two special tokens: small, and its tokens split characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "a"), ("E", "N"), ("EN", "D"), ("!", "!"), ("D", "."), ("Ã", "©")]
    tokens = ["<eos>", "<|end|>", *alphabet, *("".join(pair) for pair in merges)]
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<eos>",
        additional_special_tokens=["<|end|>"],
        clean_up_tokenization_spaces=False,
    )


def rules(tokenizer: PreTrainedTokenizerFast, *stop_strings: str, **options) -> StopRules:
    chosen = SamplingOptions(**({"max_new_tokens": 99} | options), stop_strings=stop_strings)
    return StopRules(options=chosen, eos_token_ids={tokenizer.convert_tokens_to_ids("<eos>")}, tokenizer=tokenizer)


def run(stop: StopRules, token_ids: list[int], prompt_end: Sequence[int] = ()) -> tuple[int, Finish | None, str]:
    """Feed tokens one by one: how many were taken, why it ended, and the text."""
    for count in range(1, len(token_ids) + 1):
        finish = stop.finish(token_ids[:count], prompt_end=prompt_end, limit=stop.options.max_new_tokens)
        if finish is not None:
            return count, finish, stop.text(token_ids[:count], finish, prompt_end=prompt_end)
    return len(token_ids), None, stop.text(token_ids, Finish.LENGTH, prompt_end=prompt_end)


def characters(text: str) -> list[int]:
    return tiny_tokenizer().encode(text, add_special_tokens=False)


def test_an_end_of_sequence_token_ends_a_response_and_is_not_in_its_text() -> None:
    tokenizer = tiny_tokenizer()
    tokens = [*characters("hi"), tokenizer.eos_token_id, *characters("no")]
    assert run(rules(tokenizer), tokens) == (3, Finish.EOS, "hi")


def test_any_of_several_end_of_sequence_tokens_ends_a_response() -> None:
    tokenizer = tiny_tokenizer()
    stop = StopRules(
        options=SamplingOptions(max_new_tokens=9),
        eos_token_ids={2, characters("x")[0]},
        tokenizer=tokenizer,
    )
    assert run(stop, characters("abxc")) == (3, Finish.EOS, "ab")


def test_a_stop_token_ends_a_response_and_is_not_in_its_text() -> None:
    stop = rules(tiny_tokenizer(), stop_token_ids=(characters("b")[0],))
    assert run(stop, characters("aabaa")) == (3, Finish.STOP, "aa")


def test_a_response_is_cut_at_the_limit() -> None:
    assert run(rules(tiny_tokenizer(), max_new_tokens=3), characters("abcdef")) == (3, Finish.LENGTH, "abc")
    assert run(rules(tiny_tokenizer(), max_new_tokens=1), characters("a")) == (1, Finish.LENGTH, "a")


def test_the_end_of_sequence_is_named_even_where_it_falls_on_the_limit() -> None:
    tokenizer = tiny_tokenizer()
    stop = rules(tokenizer, max_new_tokens=3)
    assert run(stop, [*characters("ab"), tokenizer.eos_token_id]) == (3, Finish.EOS, "ab")


def test_a_stop_string_across_tokens_stays_in_the_tokens_and_leaves_the_text() -> None:
    assert run(rules(tiny_tokenizer(), "end."), characters("the end. more")) == (8, Finish.STOP, "the ")


def test_of_several_stop_strings_the_one_that_begins_first_cuts_the_text() -> None:
    assert run(rules(tiny_tokenizer(), "d.", "end."), characters("the end. more")) == (8, Finish.STOP, "the ")
    assert run(rules(tiny_tokenizer(), "zz", "he"), characters("the end")) == (3, Finish.STOP, "t")


def test_a_stop_string_that_repeats_its_beginning_is_found() -> None:
    assert run(rules(tiny_tokenizer(), "aab"), characters("aaaab")) == (5, Finish.STOP, "aa")


def test_a_token_may_complete_a_stop_string_and_go_beyond_it() -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer.convert_tokens_to_ids(["x", "EN", "D."])
    assert run(rules(tokenizer, "END"), [*tokens, 5]) == (3, Finish.STOP, "x")


def test_a_stop_string_of_several_bytes_a_character_is_found_when_its_last_byte_comes() -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode("so 🙂!", add_special_tokens=False)
    assert len(tokens) == 8, "one token per byte"
    assert run(rules(tokenizer, "🙂"), tokens) == (7, Finish.STOP, "so ")


def test_another_character_that_shares_bytes_is_no_stop_string() -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode("so 🙃 fine", add_special_tokens=False)
    assert run(rules(tokenizer, "🙂"), tokens) == (len(tokens), None, "so 🙃 fine")


def test_a_stop_string_may_be_the_text_of_a_special_token() -> None:
    tokenizer = byte_tokenizer()
    tokens = [*tokenizer.encode("done", add_special_tokens=False), 1, 9]
    assert run(rules(tokenizer, "<|end|>"), tokens) == (5, Finish.STOP, "done")


def test_a_stop_string_may_end_in_a_space() -> None:
    assert run(rules(tiny_tokenizer(), ". "), characters("a.b. c")) == (5, Finish.STOP, "a.b")


def test_a_stop_string_before_the_minimum_is_let_pass_and_does_not_cut_the_text_later() -> None:
    stop = rules(tiny_tokenizer(), "b", min_new_tokens=4)
    assert run(stop, characters("abacab")) == (6, Finish.STOP, "abaca")


def test_text_leaves_out_special_tokens() -> None:
    tokenizer = tiny_tokenizer()
    tokens = [*characters("a"), tokenizer.convert_tokens_to_ids("<|user|>"), *characters("b")]
    assert rules(tokenizer).text(tokens, Finish.LENGTH, prompt_end=()) == "ab"


@pytest.mark.parametrize("seed", range(30))
def test_stop_strings_end_a_response_at_the_first_token_after_which_the_text_holds_one(seed: int) -> None:
    """Against the definition: decode everything after every token."""
    draw = random.Random(seed)
    tokenizer = byte_tokenizer()
    alphabet = [
        tokenizer.convert_tokens_to_ids(t) for t in ("E", "N", "EN", "END", "D.", "!", "!!", "Ã", "©", "Ã©", "Ġ")
    ]
    strings = draw.sample(["END", "é!", "!!!", "ND.", " é", "EE"], k=2)
    tokens = [draw.choice(alphabet) for _ in range(60)]
    taken, finish, text = run(rules(tokenizer, *strings), tokens)
    texts = [tokenizer.decode(tokens[:count]) for count in range(1, 61)]
    holds = [any(string in each for string in strings) for each in texts]
    expected = holds.index(True) + 1 if True in holds else 60
    assert taken == expected
    assert (finish is Finish.STOP) == (True in holds)
    if finish is Finish.STOP:
        whole = texts[expected - 1]
        assert text == whole[: min(whole.find(string) for string in strings if string in whole)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_under_every_tokenizer_a_response_ends_where_what_it_adds_to_its_prompt_holds_a_stop_string(
    kind: str, seed: int
) -> None:
    """Against the definition: decode the prompt and all that follows, after every token."""
    draw, tokenizer = random.Random(seed), KINDS[kind]()
    prompt_ids = tuple(tokenizer(draw.choice(["Once upon", "a\n", "", "\U0001f642" * 9]))["input_ids"])
    words = [" a", "\n", "a", "\U0001f642", "  ", "t", "\u00e9", "\n\n", "return"]
    alphabet = sorted({token for word in words for token in tokenizer(word, add_special_tokens=False)["input_ids"]})
    tokens = [draw.choice(alphabet) for _ in range(40)]
    strings = draw.sample([" a", "\n\n", "   ", "\U0001f642", "a a", " ta", "\u00e9\n"], k=2)
    whole = [decode_behind(tokenizer, prompt_ids, tokens[:count], skip_special_tokens=False) for count in range(1, 41)]
    holds = [any(string in each for string in strings) for each in whole]
    expected = holds.index(True) + 1 if True in holds else 40
    taken, finish, text = run(rules(tokenizer, *strings), tokens, end_of_prompt(tokenizer, prompt_ids))
    assert (taken, finish is Finish.STOP) == (expected, True in holds)
    added = whole[expected - 1]
    if True in holds and prompt_ids != (1,):  # a lone BOS is no text, and the space behind it begins the text
        added = added[: min(added.find(string) for string in strings if string in added)]
        assert text == added


def test_a_stop_string_may_begin_with_the_space_of_the_first_token() -> None:
    tokenizer = legacy()
    prompt_ids = tokenizer("Once upon")["input_ids"]
    tokens = tokenizer.convert_tokens_to_ids(["\u2581", "m", "e"])
    assert run(rules(tokenizer, " m"), tokens, prompt_ids) == (2, Finish.STOP, "")


def test_an_end_of_sequence_leaves_the_first_space_of_a_response() -> None:
    tokenizer = legacy()
    tokens = [*tokenizer.convert_tokens_to_ids(["\u2581\u2581\u2581\u2581", "\u2581return"]), tokenizer.eos_token_id]
    stop = StopRules(
        options=SamplingOptions(max_new_tokens=9), eos_token_ids={tokenizer.eos_token_id}, tokenizer=tokenizer
    )
    assert run(stop, tokens, tokenizer("a:\n")["input_ids"]) == (3, Finish.EOS, "     return")


@pytest.mark.parametrize("filler", ["\u20ac\U0001f642", "\u20ac\u20ac", "\U0001f642\U0001f642\u00e9"])
def test_a_stop_string_behind_characters_of_many_tokens_is_found(filler: str) -> None:
    """Bytes that begin within a character would spoil those that follow them."""
    tokenizer = legacy()
    stop, tokens = rules(tokenizer, "\n\n"), tokenizer(filler * 9 + "\n\n", add_special_tokens=False)["input_ids"]
    assert run(stop, tokens, tokenizer("a")["input_ids"]) == (len(tokens), Finish.STOP, f" {filler * 9}")
