"""The data sets at hand load in each of their forms, with the counts that a look at them by other means gives."""

import json
from collections import Counter

import pytest

from proximo.data.examples import ExampleOptions, load_text_examples
from proximo.data.preferences import PairOptions, load_preference_pairs
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.readers.reading import load_rows
from proximo.data.readers.source import DataSource
from real_data import real_data

SETS = {
    "hh_rlhf": ("hh_rlhf/harmless_base_dev.jsonl", {}, 1612, 0),
    "pandalm": (
        "preferences/pandalm_dev.jsonl",
        # One answer is the word True, which the file has as a truth value: braces take any value as text.
        {
            "output_1": "{response1}",
            "output_2": "{response2}",
            "label": "{annotator1} {annotator2} {annotator3}",
        },
        695,
        54,
    ),
    "llmbar": ("preferences/llmbar_dev.jsonl", {"prompt": "input"}, 300, 0),
    "oasst": ("preferences/oasst_conversational_dev.jsonl", {}, 327, 0),
    "sharegpt": ("preferences/sharegpt_dpo_dev.json", {}, 200, 0),
    "stack_exchange": (
        "preferences/stack_exchange_paired_tiny.json",
        {"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
        25,
        0,
    ),
}
"""File, columns, rows, ties."""


def rows_of(name: str, *, max_rows: int | None = None):
    path, columns, _, _ = SETS[name]
    return load_rows([DataSource(path=str(real_data(path)), columns=columns, max_rows=max_rows)]).rows


@pytest.mark.parametrize(("name", "as_messages"), [*((name, name == "hh_rlhf") for name in SETS), ("pandalm", True)])
def test_every_preference_set_gives_a_pair_for_each_row_but_ties(name: str, as_messages: bool, real_tokenizers) -> None:
    tokenizer = real_tokenizers["tiny_bpe"]
    pairs, report = load_preference_pairs(rows_of(name), tokenizer, PairOptions(as_messages=as_messages))
    _, _, num_rows, num_ties = SETS[name]
    assert (report.num_rows, report.num_ties) == (num_rows, num_ties)
    assert report.num_kept_rows == len(pairs) == num_rows - num_ties
    for pair in pairs:
        assert pair.chosen_token_ids[-1] == pair.rejected_token_ids[-1] == tokenizer.eos_token_id
        assert pair.prompt_token_ids


def test_the_pairs_of_hh_rlhf_put_together_again_are_its_transcripts(real_tokenizers) -> None:
    rows = rows_of("hh_rlhf")
    pairs, _ = load_preference_pairs(rows, real_tokenizers["tiny_bpe"], PairOptions())
    for row, pair in zip(rows, pairs, strict=True):
        assert pair.prompt + pair.chosen == row.values["chosen"]
        assert pair.prompt + pair.rejected == row.values["rejected"]
        assert pair.prompt.endswith("\n\nAssistant:")
    last_turn = [row.values["chosen"].rpartition("\n\nAssistant:")[0] + "\n\nAssistant:" for row in rows]
    # Four rows part before the last turn of the chosen or the rejected transcript.
    assert sum(pair.prompt == prompt for pair, prompt in zip(pairs, last_turn, strict=True)) >= 1608


def test_the_majority_of_pandalm_is_the_one_counted_by_hand(real_tokenizers) -> None:
    with real_data("preferences/pandalm_dev.jsonl").open() as file:
        raw = [json.loads(line) for line in file]
    pairs, _ = load_preference_pairs(rows_of("pandalm"), real_tokenizers["tiny_bpe"], PairOptions())
    expected = []
    for number, row in enumerate(raw, start=1):
        (label, votes), *_ = Counter(row[f"annotator{index}"] for index in (1, 2, 3)).most_common()
        if label != 0 and votes > 1:
            expected.append((f"pandalm_dev-{number}", str(row[f"response{label}"]).casefold()))
    assert [(pair.id, str(pair.chosen).casefold()) for pair in pairs] == expected


def test_prompts_and_texts_come_from_the_same_sets(real_tokenizers) -> None:
    """The three stages of a pipeline on one file: what is asked is the beginning of what is learnt."""
    tokenizer = real_tokenizers["tiny_bpe"]
    for name in ("hh_rlhf", "oasst", "stack_exchange"):
        rows = rows_of(name, max_rows=100)
        prompts, _ = load_prompts(rows, tokenizer, PromptOptions())
        texts, _ = load_text_examples(rows, tokenizer, ExampleOptions())
        pairs, _ = load_preference_pairs(rows, tokenizer, PairOptions())
        learnt = {text.id: text for text in texts}
        asked = {prompt.id: prompt for prompt in prompts}
        for pair in pairs:
            assert asked[pair.id].token_ids == pair.prompt_token_ids
            assert learnt[pair.id].token_ids == pair.prompt_token_ids + pair.chosen_token_ids


def test_stories_are_documents_and_blocks_of_them_hold_every_token(real_tokenizers) -> None:
    source = DataSource(path=str(real_data("lm_corpus/tinystories_dev.txt")), separator="<|endoftext|>", max_rows=200)
    rows = load_rows([source]).rows
    tokenizer = real_tokenizers["tiny_bpe"]
    assert rows[1].values["text"].startswith("Once upon a time, there was a little car named Beep.")
    stories, report = load_text_examples(rows, tokenizer, ExampleOptions())
    blocks, in_blocks = load_text_examples(rows, tokenizer, ExampleOptions(layout="blocks", max_tokens=256))
    num_tokens = sum(len(story.token_ids) for story in stories)
    assert sum(block.num_targets for block in blocks) == num_tokens - 1
    assert report.num_characters == in_blocks.num_characters == sum(len(row.values["text"]) for row in rows)
