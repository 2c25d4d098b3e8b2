"""Texts to learn: which tokens count in the loss, and how long texts are cut."""

import pytest

from builders import tiny_tokenizer
from proximo.data.examples import ExampleOptions, TextExample, load_text_examples
from proximo.data.rows import Row
from proximo.errors import ConfigError, DataError

USER = {"role": "user", "content": "ask"}
REPLY = {"role": "assistant", "content": "re"}


def load(*values: dict, **options):
    rows = [Row(source="made", name="made", number=number, values=value) for number, value in enumerate(values, 1)]
    return load_text_examples(rows, tiny_tokenizer(), ExampleOptions(**options))


def shown(example: TextExample) -> str:
    """The text with the targets in capitals; marks as one sign each."""
    tokens = tiny_tokenizer().convert_ids_to_tokens(list(example.token_ids))
    short = {"<eos>": "$", "<|user|>": "u", "<|assistant|>": "a"}
    letters = [short.get(token, token) for token in tokens]
    return "".join(
        {"$": "!"}.get(letter, letter.upper()) if target else letter
        for letter, target in zip(letters, example.loss_mask, strict=True)
    )


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ({"text": "abc"}, {}, "aBC!"),
        ({"prompt": "ab", "response": "cd"}, {}, "abCD!"),
        ({"prompt": "ab", "response": "cd"}, {"train_on": "everything"}, "aBCD!"),
        ({"prompt": "", "response": "cd"}, {}, "cD!"),
        ({"prompt": "ab", "response": ""}, {}, "ab!"),
        ({"instruction": "ab", "input": "", "output": "cd"}, {}, "abCD!"),
        ({"prompt": "ab", "completion": "cd"}, {}, "abCD!"),
        ({"prompt": [USER], "completion": [REPLY]}, {}, "uask$aRE!"),
        ({"prompt": "ab", "response": "cd", "output": "x"}, {}, "abCD!"),
        ({"prompt": "ab", "chosen": "cd", "rejected": "x"}, {}, "abCD!"),
        ({"prompt": "ab", "output_1": "x", "output_2": "cd", "label": 2}, {}, "abCD!"),
        ({"messages": [USER, REPLY]}, {}, "uask$aRE!"),
        ({"messages": [USER, REPLY]}, {"train_on": "everything"}, "uASK!ARE!"),
        ({"messages": [USER, REPLY, USER, REPLY]}, {}, "uask$aRE!uask$aRE!"),
        ({"messages": [USER, REPLY, USER, REPLY]}, {"train_on": "last_response"}, "uask$are$uask$aRE!"),
        ({"prompt": [USER], "response": [REPLY, USER, REPLY]}, {"train_on": "last_response"}, "uask$are$uask$aRE!"),
        ({"messages": [REPLY, USER, REPLY]}, {"train_on": "last_response"}, "are$uask$aRE!"),
        ({"messages": [USER, REPLY, USER]}, {}, "uask$aRE!"),
        ({"conversations": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "re"}]}, {}, "uask$aRE!"),
        ({"prompt": "ask", "response": "re"}, {"as_messages": True}, "uask$aRE!"),
        ({"prompt": [USER], "response": "re"}, {}, "uask$aRE!"),
        ({"text": "x", "messages": [USER, REPLY]}, {"form": "text"}, "x!"),
        ({"prompt": "ab", "response": "cd", "messages": [USER, REPLY]}, {"form": "messages"}, "uask$aRE!"),
    ],
)
def test_the_loss_counts_what_the_assistant_wrote_or_everything(values, options, expected) -> None:
    examples, report = load(values, **options)
    assert shown(examples[0]) == expected
    assert report.num_tokens == len(expected)
    assert examples[0].num_targets == sum(letter.isupper() or letter == "!" for letter in expected)


def test_the_first_token_is_never_a_target() -> None:
    assert load({"text": "a"})[0][0].loss_mask == (False, True)
    with pytest.raises(DataError, match="1 without a token to learn, dropped"):
        load({"text": ""})


def test_the_form_of_a_source_is_that_of_its_first_row() -> None:
    with pytest.raises(DataError, match=r"made, row 2: no column 'text'"):
        load({"text": "a"}, {"prompt": "ab", "response": "cd"})


def test_every_source_has_a_form_of_its_own() -> None:
    rows = [
        Row(source="a.jsonl", name="a", number=1, values={"text": "abc"}),
        Row(source="b.jsonl", name="b", number=1, values={"prompt": "ab", "response": "c"}),
        Row(source="a.jsonl", name="a", number=2, values={"text": "ab"}),
    ]
    examples, _ = load_text_examples(rows, tiny_tokenizer(), ExampleOptions())
    assert [(example.id, shown(example)) for example in examples] == [("a-1", "aBC!"), ("b-1", "abC!"), ("a-2", "aB!")]


def test_too_long_examples_are_dropped_or_keep_their_beginning() -> None:
    values = [
        {"prompt": "abcd", "response": "efgh"},
        {"prompt": "ab", "response": "cd"},
        {"prompt": "abcdef", "response": "x"},
    ]
    examples, report = load(*values, max_tokens=6)
    assert [shown(example) for example in examples] == ["abCD!"]
    assert (report.num_too_long, report.num_truncated) == (2, 0)
    examples, report = load(*values, max_tokens=6, too_long="truncate")
    # No end is learnt where the text was cut, and where nothing of the response is left the row is dropped.
    assert [shown(example) for example in examples] == ["abcdEF", "abCD!"]
    assert (report.num_too_long, report.num_truncated, report.num_kept_rows) == (1, 1, 2)


def test_characters_are_those_that_are_learnt() -> None:
    assert load({"text": "abc"}, {"text": "d"})[1].num_characters == 4
    assert load({"prompt": "ab", "response": "cde"})[1].num_characters == 3
    assert load({"prompt": "ab", "response": "cde"}, train_on="everything")[1].num_characters == 5
    assert load({"text": "abcdef"}, max_tokens=4, too_long="truncate")[1].num_characters == 3
    assert load({"text": "abc"}, {"text": "def"}, max_tokens=3, layout="blocks")[1].num_characters == 6


def test_ties_are_left_out_and_empty_responses_counted() -> None:
    vote = {"prompt": "ab", "output_1": "x", "output_2": "cd"}
    examples, report = load({**vote, "label": 0}, {**vote, "label": 1}, {**vote, "label": 2, "output_2": ""})
    assert [shown(example) for example in examples] == ["abX!", "ab!"]
    assert (report.num_ties, report.num_empty_responses) == (1, 1)
    assert str(report).startswith("2 of 3 rows kept, 1 tie dropped, 1 empty response; ")


@pytest.mark.parametrize("max_tokens", [2, 3, 4, 7, 100])
def test_blocks_hold_the_joined_texts_and_each_token_is_a_target_once(max_tokens: int) -> None:
    examples, report = load({"text": "abc"}, {"text": "de"}, {"text": "fghi"}, layout="blocks", max_tokens=max_tokens)
    stream = "abc$de$fghi$".replace("$", "!").upper()
    targets = "".join(letter for example in examples for letter in shown(example) if letter.isupper() or letter == "!")
    assert targets == stream[1:]
    assert all(len(example.token_ids) <= max_tokens for example in examples)
    assert all(len(example.token_ids) == max_tokens for example in examples[:-1])
    assert len({example.id for example in examples}) == len(examples)
    assert report.num_kept_rows == 3


def test_blocks_are_for_plain_text() -> None:
    with pytest.raises(ConfigError, match="plain text"):
        load({"prompt": "ab", "response": "cd"}, layout="blocks", max_tokens=4)
