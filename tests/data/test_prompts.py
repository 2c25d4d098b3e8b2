"""Prompts from rows: what is asked, the reference answer, the metadata; too long is dropped or loses its beginning."""

import pytest
from tokenizers.processors import TemplateProcessing

from builders import tiny_tokenizer
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.rows import Row
from proximo.errors import ConfigError, DataError

SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "ask"}
REPLY = {"role": "assistant", "content": "reply"}


def load(*values: dict, **options):
    rows = [Row(source="made", name="made", number=number, values=value) for number, value in enumerate(values, 1)]
    return load_prompts(rows, tiny_tokenizer(), PromptOptions(**options))


@pytest.mark.parametrize(
    ("values", "text", "messages"),
    [
        ({"prompt": "hi"}, "hi", None),
        ({"prompt": [USER]}, None, (USER,)),
        ({"messages": [SYSTEM, USER, REPLY, USER]}, None, (SYSTEM, USER, REPLY, USER)),
        ({"messages": [USER, REPLY]}, None, (USER,)),
        (
            {"messages": [{**USER, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
            None,
            ({**USER, "content": "ab"},),
        ),
        ({"conversations": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "reply"}]}, None, (USER,)),
        ({"instruction": "do", "input": "this"}, "do\n\nthis", None),
        ({"instruction": "do", "input": " "}, "do", None),
        ({"instruction": "do", "input": None}, "do", None),
        ({"prompt": "hi", "chosen": "a", "rejected": "b"}, "hi", None),
        ({"prompt": "hi", "output_1": "a", "output_2": "b", "label": 0}, "hi", None),
        (
            {"chosen": "\n\nHuman: hi\n\nAssistant: a", "rejected": "\n\nHuman: hi\n\nAssistant: b"},
            "\n\nHuman: hi\n\nAssistant:",
            None,
        ),
        ({"prompt": "x", "chosen": [USER, REPLY], "rejected": [USER, {**REPLY, "content": "no"}]}, None, (USER,)),
    ],
)
def test_a_prompt_is_what_the_form_of_the_row_says(values, text, messages) -> None:
    prompt = load(values)[0][0]
    assert (prompt.text, prompt.messages) == (text, messages)


def test_the_answer_and_all_other_columns_go_along() -> None:
    prompts, _ = load(
        {"prompt": "a", "answer": 145.0, "nums": [1, 2], "tests": {"t": 1}, "id": "k"},
        {"prompt": "b", "answer": None},
    )
    assert (prompts[0].answer, prompts[0].id) == ("145.0", "k")
    assert prompts[0].metadata == {"answer": 145.0, "nums": [1, 2], "tests": {"t": 1}, "id": "k"}
    assert (prompts[1].answer, prompts[1].id, prompts[1].metadata) == (None, "made-2", {})


def test_text_prompts_become_messages_on_request() -> None:
    prompt = load({"prompt": "ask"}, as_messages=True, system="s")[0][0]
    assert prompt.messages == (SYSTEM, USER)
    assert prompt.text is None
    tokenizer = tiny_tokenizer()
    expected = tokenizer.apply_chat_template([SYSTEM, USER], add_generation_prompt=True, return_dict=False)
    assert list(prompt.token_ids) == expected


def test_a_transcript_becomes_messages_on_request() -> None:
    start = "\n\nHuman: ask\n\nAssistant: reply\n\nHuman: ask\n\nAssistant:"
    prompt = load({"chosen": f"{start} a", "rejected": f"{start} b"}, as_messages=True)[0][0]
    assert prompt.messages == (USER, REPLY, USER)


def test_a_system_message_of_the_conversation_is_kept() -> None:
    assert load({"prompt": [SYSTEM, USER]}, system="other")[0][0].messages == (SYSTEM, USER)
    assert load({"prompt": [USER]}, system="s")[0][0].messages == (SYSTEM, USER)
    with pytest.raises(ConfigError, match="as_messages"):
        load({"prompt": "ask"}, system="s")


def test_the_opening_words_of_a_text_are_a_prompt() -> None:
    prompts, _ = load({"prompt": " one  two\nthree four"}, {"prompt": "one"}, {"prompt": "  "}, first_words=3)
    assert [prompt.text for prompt in prompts] == [" one  two\nthree", "one", "  "]
    assert [len(prompt.token_ids) for prompt in prompts] == [15, 3, 2]
    with pytest.raises(ConfigError, match=r"made, row 1: first_words is for text"):
        load({"prompt": [USER]}, first_words=3)


def test_too_long_prompts_are_dropped_and_counted() -> None:
    prompts, report = load({"prompt": "abcdef"}, {"prompt": "abcde"}, max_tokens=5)
    assert [prompt.id for prompt in prompts] == ["made-2"]
    assert (report.num_rows, report.num_kept_rows, report.num_too_long, report.num_tokens) == (2, 1, 1, 5)
    assert str(report) == "1 of 2 rows kept, 1 too long, dropped; 5 tokens"
    with pytest.raises(DataError, match=r"no prompt is left: 0 of 1 row kept, 1 too long.*max_tokens 5"):
        load({"prompt": "abcdef"}, max_tokens=5)


def test_a_truncated_prompt_keeps_its_end_and_its_text_is_cut_alike() -> None:
    prompts, report = load({"prompt": "abcdefgh"}, {"prompt": "xyz"}, max_tokens=5, too_long="truncate")
    assert [prompt.text for prompt in prompts] == ["defgh", "xyz"]
    assert prompts[0].token_ids == tuple(tiny_tokenizer()("defgh")["input_ids"])
    assert (report.num_truncated, report.num_too_long) == (1, 0)


def test_a_truncated_prompt_keeps_its_bos() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    row = Row(source="made", number=1, values={"prompt": "abcdefgh"})
    prompt = load_prompts([row], tokenizer, PromptOptions(max_tokens=5, too_long="truncate"))[0][0]
    assert (prompt.token_ids, prompt.text) == ((1, 10, 11, 12, 13), "efgh")


def test_a_truncated_conversation_loses_its_oldest_turns_and_stays_one() -> None:
    turns = [SYSTEM, {**USER, "content": "first"}, REPLY, {**USER, "content": "second"}, REPLY, USER]
    whole = len(load({"prompt": turns})[0][0].token_ids)
    for limit, kept in ((whole, turns), (whole - 1, [SYSTEM, *turns[3:]]), (23, [SYSTEM, USER]), (9, [SYSTEM, USER])):
        prompt = load({"prompt": turns}, max_tokens=limit, too_long="truncate")[0][0]
        assert prompt.messages == tuple(kept)
        assert len(prompt.token_ids) <= limit
    with pytest.raises(DataError, match="no prompt is left"):
        load({"prompt": turns}, max_tokens=8, too_long="truncate")


def test_a_cut_within_a_character_leaves_whole_characters_in_the_text(real_tokenizers) -> None:
    tokenizer = real_tokenizers["gpt2"]
    row = Row(source="made", number=1, values={"prompt": "\U0001f9ff abc"})
    num_tokens = len(tokenizer(row.values["prompt"])["input_ids"])
    prompt = load_prompts([row], tokenizer, PromptOptions(max_tokens=num_tokens - 1, too_long="truncate"))[0][0]
    assert prompt.text == " abc"
    assert len(prompt.token_ids) == num_tokens - 1


def test_equal_prompts_are_kept_and_counted() -> None:
    prompts, report = load({"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}, {"prompt": "a"})
    assert len(prompts) == 4
    assert report.num_duplicates == 2
    assert "2 duplicates" in str(report)


@pytest.mark.parametrize(
    ("cell", "base_score"), [([0.5, 1, "0.0"], 0.5), (0.25, 0.25), ("2", 2.0), ([1], 1.0), ([], None), (None, None)]
)
def test_base_scores_are_averaged(cell: object, base_score: float | None) -> None:
    (prompt,), _ = load({"prompt": "hi", "base_scores": cell})
    assert prompt.base_score == base_score
    assert "base_scores" not in prompt.metadata


@pytest.mark.parametrize("cell", [[1.0, None], ["good"], {"mean": 1}, [float("inf")], True, [""]])
def test_base_scores_that_are_no_numbers_are_refused_with_the_row(cell: object) -> None:
    with pytest.raises(DataError, match="made, row 2: column 'base_scores' must"):
        load({"prompt": "hi"}, {"prompt": "ho", "base_scores": cell})


def test_prompts_are_filled_with_their_last_token_up_to_the_limit() -> None:
    plain, _ = load({"prompt": "abc"}, {"prompt": "abcd"}, {"prompt": "abcdefg"}, max_tokens=6)
    filled, report = load({"prompt": "abc"}, {"prompt": "abcd"}, {"prompt": "abcdefg"}, max_tokens=6, fill_to_max=True)
    wanted = [(prompt.token_ids[-1],) * (6 - len(prompt.token_ids)) + prompt.token_ids for prompt in plain]
    assert [prompt.token_ids for prompt in filled] == wanted
    assert [len(ids) for ids in wanted] == [6, 6]
    assert (report.num_tokens, report.num_too_long) == (12, 1)
