"""Preference pairs from every form of row: the better response first, ties and equal ones left out, responses whole."""

import pytest

from builders import tiny_tokenizer
from proximo.data.preferences import PairOptions, PreferencePair, load_preference_pairs
from proximo.data.rows import Row
from proximo.errors import DataError

SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "ask"}
GOOD = {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}
HUMAN = {"from": "human", "value": "ask"}


def load(*values: dict, **options):
    rows = [Row(source="made", name="made", number=number, values=value) for number, value in enumerate(values, 1)]
    return load_preference_pairs(rows, tiny_tokenizer(), PairOptions(**options))


def shown(pair: PreferencePair) -> tuple[str, str, str]:
    tokenizer = tiny_tokenizer()
    ids = (pair.prompt_token_ids, pair.chosen_token_ids, pair.rejected_token_ids)
    prompt, chosen, rejected = ("".join(tokenizer.convert_ids_to_tokens(list(part))) for part in ids)
    return prompt, chosen, rejected


TEXT = ("ask", "good<eos>", "bad<eos>")
CHAT = ("<|user|>ask<eos><|assistant|>", "good<eos>", "bad<eos>")
FORMS = {
    "text": ({"prompt": "ask", "chosen": "good", "rejected": "bad"}, {}, TEXT),
    "instruction": (
        {"instruction": "as", "input": "k", "chosen": "good", "rejected": "bad"},
        {},
        ("as\n\nk", *TEXT[1:]),
    ),
    "text as messages": ({"prompt": "ask", "chosen": "good", "rejected": "bad"}, {"as_messages": True}, CHAT),
    "messages and text": ({"prompt": [USER], "chosen": "good", "rejected": "bad"}, {}, CHAT),
    "conversational": ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, {}, CHAT),
    "one message": ({"prompt": [USER], "chosen": GOOD, "rejected": BAD}, {"form": "conversational"}, CHAT),
    "whole conversations": ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}, CHAT),
    "whole, with a text prompt": ({"prompt": "ask", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}, CHAT),
    "trailing turn of the user": ({"chosen": [USER, GOOD, USER], "rejected": [USER, BAD]}, {}, CHAT),
    "sharegpt": (
        {
            "conversations": [HUMAN],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        {},
        CHAT,
    ),
    "transcript": (
        {"chosen": "\n\nHuman: ask\n\nAssistant: good", "rejected": "\n\nHuman: ask\n\nAssistant: bad"},
        {},
        ("\n\nHuman: ask\n\nAssistant:", " good<eos>", " bad<eos>"),
    ),
    "transcript as messages": (
        {"chosen": "\n\nHuman: ask\n\nAssistant: good", "rejected": "\n\nHuman: ask\n\nAssistant: bad"},
        {"as_messages": True},
        CHAT,
    ),
    "implicit prompt": ({"chosen": "ask good", "rejected": "ask bad"}, {}, ("ask", " good<eos>", " bad<eos>")),
    "implicit prompt, half a word": (
        {"chosen": "ask bad", "rejected": "ask bed"},
        {},
        ("ask", " bad<eos>", " bed<eos>"),
    ),
    "implicit prompt, a line": ({"chosen": "ask\nbad", "rejected": "ask\nbed"}, {}, ("ask\n", "bad<eos>", "bed<eos>")),
    "implicit prompt, one the beginning of the other": (
        {"chosen": "ask it now", "rejected": "ask it"},
        {},
        ("ask", " it now<eos>", " it<eos>"),
    ),
    "outputs, first": ({"prompt": "ask", "output_1": "good", "output_2": "bad", "label": 1}, {}, TEXT),
    "outputs, second": ({"prompt": "ask", "output_1": "bad", "output_2": "good", "label": "2"}, {}, TEXT),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_prompt_chosen_and_rejected(name: str) -> None:
    values, options, expected = FORMS[name]
    pair = load(values, **options)[0][0]
    assert shown(pair) == expected
    assert pair.num_tokens == 2 * len(pair.prompt_token_ids) + len(pair.chosen_token_ids) + len(pair.rejected_token_ids)


@pytest.mark.parametrize(
    ("votes", "winner"),
    [
        ("1 1 2", "a"),
        ("2,2,1", "b"),
        ([2, 2, 0], "b"),
        ("0 1 1", "a"),
        (1, "a"),
        ("0 0 1", None),
        ("0 1 2", None),
        ("1 2", None),
        (0, None),
    ],
)
def test_the_output_with_most_votes_wins_and_no_majority_is_a_tie(votes, winner) -> None:
    sure = {"prompt": "ask", "output_1": "a", "output_2": "b", "label": 1}
    pairs, report = load(sure, {**sure, "label": votes})
    assert report.num_ties == (winner is None)
    assert [pair.chosen for pair in pairs[1:]] == ([winner] if winner else [])


def test_transcripts_that_part_early_keep_their_later_turns_in_the_response() -> None:
    start = "\n\nHuman: a\n\nAssistant:"
    values = {"chosen": f"{start} b\n\nHuman: c\n\nAssistant: d", "rejected": f"{start} e"}
    pair = load(values)[0][0]
    assert (pair.prompt, pair.chosen, pair.rejected) == (start, " b\n\nHuman: c\n\nAssistant: d", " e")
    chat = load(values, as_messages=True)[0][0]
    assert [message["content"] for message in chat.chosen] == ["b", "c", "d"]
    assert [message["role"] for message in chat.chosen] == ["assistant", "user", "assistant"]


def test_a_transcript_that_ends_with_the_human_ends_with_the_answer_before() -> None:
    start = "\n\nHuman: ask\n\nAssistant:"
    values = {"chosen": f"{start} good\n\nHuman: ask", "rejected": f"{start} bad"}
    assert load(values, as_messages=True)[0][0].chosen == (GOOD,)


def test_responses_with_the_same_beginning_are_not_split_within_it() -> None:
    start = "\n\nHuman: a\n\nAssistant:"
    pair = load({"chosen": f"{start} I am", "rejected": f"{start} I can"})[0][0]
    assert (pair.prompt, pair.chosen, pair.rejected) == (start, " I am", " I can")
    # One is the beginning of the other.
    pair = load({"chosen": f"{start} I", "rejected": f"{start} I can"})[0][0]
    assert (pair.chosen, pair.rejected) == (" I", " I can")


def test_turns_of_one_speaker_in_a_row_are_one_message() -> None:
    start = "\n\nHuman: a\n\nHuman: b\n\nAssistant:"
    pair = load({"chosen": f"{start} x", "rejected": f"{start} y"}, as_messages=True)[0][0]
    assert pair.prompt == ({"role": "user", "content": "a\n\nb"},)


def test_whole_conversations_part_at_an_assistants_turn() -> None:
    other = {"role": "user", "content": "more"}
    pair = load({"chosen": [SYSTEM, USER, GOOD, USER, GOOD], "rejected": [SYSTEM, USER, GOOD, other, BAD]})[0][0]
    assert pair.prompt == (SYSTEM, USER)
    assert pair.chosen == (GOOD, USER, GOOD)
    assert pair.rejected == (GOOD, other, BAD)
    late = load({"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, USER, BAD]})[0][0]
    assert (late.prompt, late.chosen, late.rejected) == ((USER, GOOD, USER), (GOOD,), (BAD,))


def test_equal_responses_are_dropped_and_empty_ones_kept_and_both_are_counted() -> None:
    values = {"prompt": "ask", "chosen": "good"}
    pairs, report = load({**values, "rejected": "good"}, {**values, "rejected": ""}, {**values, "rejected": "bad"})
    assert [pair.id for pair in pairs] == ["made-2", "made-3"]
    assert (report.num_identical_pairs, report.num_empty_responses) == (1, 1)
    assert pairs[0].rejected_token_ids == (2,)


def test_pairs_with_a_response_of_too_few_words_are_dropped_and_counted() -> None:
    words = {"chosen": "one two three", "rejected": "one  two\nfour"}
    turns = [{**GOOD, "content": "one"}, {**USER, "content": "five more words of another"}, {**BAD, "content": "two"}]
    values = [
        {"prompt": "ask", **words},
        {"prompt": "ask", **words, "rejected": "one two"},
        {"prompt": "ask", **words, "chosen": ""},
    ]
    pairs, report = load(*values, min_response_words=3)
    assert [pair.id for pair in pairs] == ["made-1"]
    assert (report.num_too_short, report.num_rows) == (2, 3)
    assert "2 with too short a response" in str(report)
    assert len(load(*values)[0]) == 3
    spoken = {"prompt": [USER], "chosen": turns, "rejected": [{**GOOD, "content": "one two three"}]}
    assert len(load(spoken, min_response_words=2)[0]) == 1
    with pytest.raises(DataError, match="no pair is left"):
        load(spoken, min_response_words=3)


def test_margins_are_numbers_or_left_out() -> None:
    values = {"prompt": "ask", "chosen": "good", "rejected": "bad"}
    pairs, _ = load({**values, "margin": 2}, {**values, "margin": "0.5"}, {**values, "margin": None}, values)
    assert [pair.margin for pair in pairs] == [2.0, 0.5, None, None]


def test_truncation_takes_the_beginning_of_the_prompt_and_never_a_response() -> None:
    values = [
        {"prompt": "abcdef", "chosen": "xy", "rejected": "z"},
        {"prompt": "a", "chosen": "xyzxyz", "rejected": "z"},
    ]
    pairs, report = load(*values, max_tokens=6, too_long="truncate")
    assert [shown(pair) for pair in pairs] == [("def", "xy<eos>", "z<eos>")]
    assert pairs[0].prompt == "def"
    assert (report.num_truncated, report.num_too_long) == (1, 1)
    with pytest.raises(DataError, match="no pair is left"):
        load(*values, max_tokens=6)


def test_a_truncated_conversation_loses_the_same_turns_for_both_responses() -> None:
    values = {"prompt": [USER, GOOD, USER], "chosen": [GOOD], "rejected": [BAD]}
    pair = load(values, max_tokens=12, too_long="truncate")[0][0]
    assert pair.prompt == (USER,)
    assert shown(pair) == CHAT


def test_equal_pairs_are_kept_and_counted() -> None:
    one, other = ({"prompt": "ask", "chosen": "good", "rejected": text} for text in ("bad", "so so"))
    pairs, report = load(one, other, one, one)
    assert (len(pairs), report.num_duplicates) == (4, 2)


def test_an_empty_response_is_its_end_of_sequence() -> None:
    assert load({"prompt": "", "chosen": "a", "rejected": ""})[0][0].prompt_token_ids == ()
