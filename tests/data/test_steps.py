"""Steps and the tokens at which they end: found in any tokens, and the same in training and in use."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from builders import tiny_tokenizer
from proximo.data.rows import Row
from proximo.data.step_examples import StepOptions, load_step_examples
from proximo.data.steps import StepFinder, check_separator, split_steps
from proximo.data.tokenise import TextEncoder
from proximo.errors import ConfigError, DataError
from proximo.recipes.running_sums import rows
from steps_of_sums import step_labels


def row(**values: Any) -> Row:
    return Row(source="steps.jsonl", number=1, values={"prompt": "ab", **values})


def load(*given: Row, tokenizer: Any = None, **options: Any):
    return load_step_examples(given, tokenizer or tiny_tokenizer(), StepOptions(**options))


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, with merges of a full stop and line ends, of two line ends, and of a line end and a letter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    stop, end = ".", "Ċ"
    merges = [(end, end), (stop, end), (end, "x")]
    vocabulary = {token: index for index, token in enumerate(["<eos>", *alphabet, *(a + b for a, b in merges)])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", clean_up_tokenization_spaces=False)


def test_blank_steps_are_none() -> None:
    assert split_steps("\n a b\n\n  \nc\n") == ["a b", "c"]
    assert split_steps("one; two ;; three", ";") == ["one", "two", "three"]
    assert split_steps(" \n") == []


@pytest.mark.parametrize(
    ("text", "separator", "ended"),
    [
        ("ab\ncd\nef", "\n", ["ab\n", "ab\ncd\n"]),
        ("\n\nab\n\ncd\n", "\n", ["\n\nab\n", "\n\nab\n\ncd\n"]),
        ("ab\n\ncd\nef\n\n", "\n\n", ["ab\n\n", "ab\n\ncd\nef\n\n"]),
        ("ab.\ncd.\n", "\n", ["ab.\n", "ab.\ncd.\n"]),
        ("ä.\n\nü\n", "\n", ["ä.\n", "ä.\n\nü\n"]),
        ("aки b ки", "ки", ["aки", "aки b ки"]),
        ("ä→ü→→.", "→", ["ä→", "ä→ü→"]),
    ],
)
def test_a_step_ends_with_the_token_that_completes_its_separator(text: str, separator: str, ended: list[str]) -> None:
    """With a token for each byte, and with tokens that hold a full stop and a line end, or two line ends."""
    tokenizer = merging_tokenizer()
    ids = tokenizer(text)["input_ids"]
    ends = StepFinder(tokenizer=tokenizer, separator=separator).ends(ids)
    decoded = [tokenizer.decode(ids[: end + 1]) for end in ends]
    # A token may hold more than the separator: it is the first one up to which the text is complete.
    assert len(decoded) == len(ended)
    for found, wanted, end in zip(decoded, ended, ends, strict=True):
        assert found.startswith(wanted)
        assert not tokenizer.decode(ids[:end]).startswith(wanted)


def test_bytes_that_are_no_characters_hide_no_separator() -> None:
    tokenizer = merging_tokenizer()
    broken = tokenizer("→")["input_ids"][:1] * 9
    ids = [*broken, *tokenizer("\nb")["input_ids"], *broken, *tokenizer("\n")["input_ids"]]
    assert StepFinder(tokenizer=tokenizer).ends(ids) == [9, len(ids) - 1]


def test_a_separator_may_begin_and_end_with_the_space_of_a_token() -> None:
    """Tokenizers of SentencePiece's kind strip the space of the first token that they decode."""
    pieces = ["<unk>", "<eos>", "▁a", "▁b", ";", "▁;", "▁", "b"]
    core = Tokenizer(models.WordLevel(vocab={piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    core.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", clean_up_tokenization_spaces=False)
    ids = [pieces.index(piece) for piece in ("▁a", ";", "▁b", "▁b", "▁;", "▁a", ";", "b")]
    assert tokenizer.decode(ids) == "a; b b ; a;b"
    for separator, ends in (("; ", [2, 5]), (" ;", [4]), (" ; ", [5])):
        assert StepFinder(tokenizer=tokenizer, separator=separator).ends(ids) == ends


def test_a_token_that_begins_the_next_step_belongs_to_the_one_before() -> None:
    tokenizer = merging_tokenizer()
    ids = tokenizer("a\nxb\nc\n")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "Ċx", "b", "Ċ", "c", "Ċ"]
    assert StepFinder(tokenizer=tokenizer).ends(ids) == [1, 3, 5]


def test_an_example_ends_with_the_separator_of_its_last_step_and_not_with_the_end_of_the_answer() -> None:
    tokenizer = tiny_tokenizer()
    (example,), report = load(row(steps=["cd ", "e"], labels=[True, 0.25]))
    assert tokenizer.decode(example.token_ids) == "abcd\ne\n"
    assert [tokenizer.decode(example.token_ids[end]) for end in example.ends] == ["\n", "\n"]
    assert (example.ends, example.labels, example.num_prompt_tokens) == ((4, 6), (1.0, 0.25), 2)
    assert report.num_tokens == 7


def test_the_stepwise_rows_of_trl_are_read() -> None:
    ours, theirs = (load(row(**{name: ["cd", "e"], "labels": [True, False]}))[0] for name in ("steps", "completions"))
    assert ours == theirs


def test_messages_are_rendered_with_the_chat_template_and_do_not_end() -> None:
    tokenizer = tiny_tokenizer()
    asked = [{"role": "user", "content": "ab"}]
    (example,), _ = load(row(prompt=asked, steps=["cd", "e"], labels=[True, False]))
    assert tokenizer.decode(example.token_ids) == "<|user|>ab<eos><|assistant|>cd\ne\n"
    assert [tokenizer.decode(example.token_ids[: end + 1])[-3:] for end in example.ends] == ["cd\n", "\ne\n"]
    (text,), _ = load(row(steps=["cd", "e"], labels=[True, False]), as_messages=True)
    assert text.token_ids == example.token_ids


def test_what_a_template_writes_before_the_steps_is_no_step() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ 'hm\n\n' if m['role'] == 'assistant' }}{{ m['content'].strip() }}"
        "<eos>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    (example,), _ = load(row(steps=["cd", "e"], labels=[True, False]), tokenizer=tokenizer, as_messages=True)
    assert tokenizer.decode(example.token_ids).endswith("hm\n\ncd\ne\n")
    assert [tokenizer.decode(example.token_ids[: end + 1])[-3:] for end in example.ends] == ["cd\n", "\ne\n"]
    # A step of special tokens alone is no text: what the template wrote is not taken for it.
    with pytest.raises(DataError, match="1 with steps that the separator does not separate"):
        load(row(steps=["<|user|>", "e"], labels=[True, False]), tokenizer=tokenizer, as_messages=True)


@pytest.mark.parametrize(
    ("train_on", "given", "text", "labels"),
    [
        ("all", [1, 0, 1], "abc\nd\ne\n", (1.0, 0.0, 1.0)),
        ("until_error", [1, 0, 1], "abc\nd\n", (1.0, 0.0)),
        ("until_error", [1, 0.5, 1], "abc\nd\ne\n", (1.0, 0.5, 1.0)),
        ("last", [1, 0, 1], "abc\nd\ne\n", (1.0,)),
    ],
)
def test_the_steps_that_count(train_on: Any, given: list, text: str, labels: tuple[float, ...]) -> None:
    (example,), _ = load(row(steps=["c", "d", "e"], labels=given), train_on=train_on)
    assert tiny_tokenizer().decode(example.token_ids) == text
    assert example.labels == labels
    assert len(example.ends) == len(labels)
    assert example.ends[-1] == len(example.token_ids) - 1


def test_too_long_solutions_are_dropped_or_lose_their_last_steps() -> None:
    given = [
        row(steps=["cd", "efg"], labels=[1, 0]),
        Row(source="s", number=2, values={"prompt": "a", "steps": ["b"], "labels": [1]}),
    ]
    kept, report = load(*given, max_tokens=8)
    assert [len(example.token_ids) for example in kept] == [3]
    assert (report.num_too_long, report.num_truncated) == (1, 0)
    kept, report = load(*given, max_tokens=8, too_long="truncate")
    assert [example.labels for example in kept] == [(1.0,), (1.0,)]
    assert (report.num_too_long, report.num_truncated) == (0, 1)
    kept, report = load(*given, max_tokens=4, too_long="truncate")
    assert (len(kept), report.num_too_long) == (1, 1)


def test_rows_whose_steps_the_separator_does_not_tell_apart_are_dropped_and_counted() -> None:
    given = [
        row(steps=["c\nd", "e"], labels=[1, 0]),
        Row(source="s", number=2, values={"prompt": "a", "steps": ["b"], "labels": [1]}),
    ]
    kept, report = load(*given)
    assert (len(kept), report.num_inseparable) == (1, 1)
    assert "1 with steps that the separator does not separate, dropped" in str(report)
    assert len(load(*given, separator=";")[0]) == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": ["c"]}, "no column 'labels'"),
        ({"labels": [1]}, "no column 'steps'"),
        ({"steps": "c", "labels": [1]}, "'steps' must be a list with an entry for each step"),
        ({"steps": [], "labels": []}, "'steps' must be a list with an entry for each step, got a list of 0"),
        ({"steps": ["c", "d"], "labels": [1]}, "one label for each of the 2 steps, got 1"),
        ({"steps": ["c", " "], "labels": [1, 1]}, "has a blank step"),
        ({"steps": ["c", 3], "labels": [1, 1]}, "column 'steps' must be text, got 3"),
        ({"steps": ["c"], "labels": [2]}, "from 0 to 1; got 2"),
        ({"steps": ["c"], "labels": [float("nan")]}, "from 0 to 1; got nan"),
        ({"steps": ["c"], "labels": ["+"]}, "from 0 to 1; got the text '\\+'"),
    ],
)
def test_a_malformed_row_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"^steps.jsonl, row 1: .*{message}"):
        load(row(**values))


def test_a_separator_that_tokens_do_not_show_is_refused() -> None:
    encoder = TextEncoder(tiny_tokenizer())
    check_separator(encoder, "; ")
    with pytest.raises(ConfigError, match="cannot write step_separator '#'"):
        check_separator(encoder, "#")
    with pytest.raises(ConfigError, match=r"holds the special token '<eos>'"):
        check_separator(encoder, "\n<eos>")
    with pytest.raises(DataError, match="no solution is left"):
        load(row(steps=["c\nd"], labels=[1]))


def test_sums_in_steps_have_the_labels_that_their_check_gives_them() -> None:
    made = list(rows(200, 3, careless=0.3))
    assert all(step_labels(each["prompt"], each["steps"]) == each["labels"] for each in made)
    right = [label for each in made for label in each["labels"]]
    assert 0.4 < sum(right) / len(right) < 0.7  # 0.7, 0.49 and 0.34 of the first, second and third steps
    assert step_labels("3+4+2\n", ["3+4=7", "7+2=9", "9+1=10"]) == [True, True, False]
    assert step_labels("3+4+2\n", ["3+4=8", "7+2=9"]) == [False, False]
    with pytest.raises(ConfigError, match="at least 2"):
        list(rows(1, num_terms=1))
