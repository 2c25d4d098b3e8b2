"""The data sets of the embedded example: where each row comes from, how flawed they are, how noisy the pairs."""

import hashlib
import json
import os
import statistics
import subprocess
import sys
from random import Random

import pytest

from proximo.errors import ConfigError
from proximo.recipes.reviews import flaws
from proximo.recipes.reviews.drafts import clean_draft
from proximo.recipes.reviews.gold import COMPONENTS, gold_components, gold_score, thing_of
from proximo.recipes.reviews.review_rows import (
    FORM_FLAWS,
    NO_REVIEWS,
    SMALLEST_GAP,
    flipped_rows,
    preference_rows,
    prompt_rows,
    sft_rows,
    things,
)
from proximo.recipes.reviews.words import KINDS, PROMPTS

PROMPT = PROMPTS[0]


def made_drafts(number: int = 60, *, praise: float = 0.7):
    """(prompt, clean draft, generator) of several things."""
    for index in range(number):
        rng = Random(f"draft/{index}")
        thing = rng.choice(things("train"))
        yield PROMPT.format(thing=thing.name), clean_draft(rng, thing, praise=praise), rng


def test_a_clean_draft_full_of_praise_is_a_perfect_review():
    for prompt, draft, _ in made_drafts(200, praise=1.0):
        assert gold_score(prompt, draft.text) == 1, draft.text


def test_a_clean_draft_full_of_blame_loses_its_stars_and_nothing_else():
    for prompt, draft, _ in made_drafts(200, praise=0.0):
        assert gold_components(prompt, draft.text) == {**dict.fromkeys(COMPONENTS, 1.0), "opinion": 0.0}, draft.text


@pytest.mark.parametrize(
    ("flaw", "component"),
    [
        (flaws.change_mind, "opinion"),
        (flaws.stray, "topic"),
        (flaws.repeat_word, "variety"),
        (flaws.repeat_sentence, "variety"),
        (flaws.shuffle_sentences, "shape"),
        (flaws.shorten, "shape"),
        (flaws.lengthen, "shape"),
        (flaws.cut_off, "form"),
        *((flaw, "form") for flaw in FORM_FLAWS),
    ],
)
def test_each_flaw_lowers_the_component_that_it_is_about(flaw, component):
    changes = [
        gold_components(prompt, flaw(rng, draft).text)[component] - gold_components(prompt, draft.text)[component]
        for prompt, draft, rng in made_drafts()
    ]
    assert statistics.mean(change != 0 for change in changes) > 0.3
    if flaw is not flaws.change_mind:
        assert max(changes) <= 0


@pytest.mark.parametrize(
    ("flaw", "component"),
    [
        (flaws.change_mind, "opinion"),
        (flaws.repeat_word, "variety"),
        (flaws.shuffle_sentences, "shape"),
        (flaws.drop_capital, "form"),
    ],
)
def test_flaws_of_one_property_leave_the_other_components_alone(flaw, component):
    for prompt, draft, rng in made_drafts():
        components = gold_components(prompt, flaw(rng, draft).text)
        assert all(value == 1 for name, value in components.items() if name not in (component, "opinion")), draft.text
        if component != "opinion":
            assert components["opinion"] == pytest.approx(gold_components(prompt, draft.text)["opinion"])


@pytest.mark.parametrize("flaw", NO_REVIEWS)
def test_what_is_no_review_is_worth_little_however_good_the_review_was(flaw):
    for prompt, draft, rng in made_drafts(praise=1.0):
        assert gold_score(prompt, flaw(rng, draft).text) <= 0.5


@pytest.mark.parametrize("make", [sft_rows, preference_rows, prompt_rows])
def test_a_row_is_a_function_of_seed_and_position(make):
    assert make(120, 3)[:30] == make(30, 3)
    assert make(30, 3) == make(30, 3)
    assert make(30, 3) != make(30, 4)


@pytest.mark.parametrize(
    ("make", "digest"),
    [(sft_rows, "c91d6c2d97f00e1d"), (preference_rows, "e2a8ca3a754acd60"), (prompt_rows, "968c7e0f272405e9")],
)
def test_the_rows_are_those_that_the_published_figures_were_measured_on(make, digest):
    assert hashlib.sha256(json.dumps(make(300, 5)).encode()).hexdigest().startswith(digest)


def test_rows_do_not_depend_on_how_python_hashes_strings():
    script = "from proximo.recipes.reviews.review_rows import *; print(sft_rows(40, 0), preference_rows(40, 0))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_pairs_are_in_the_order_of_gold_but_for_the_rows_that_are_said_to_be_flipped():
    rows = preference_rows(300, 5)
    for row, flipped in zip(rows, flipped_rows(300, 5), strict=True):
        gap = gold_score(row["prompt"], row["chosen"]) - gold_score(row["prompt"], row["rejected"])
        assert abs(gap) >= SMALLEST_GAP
        assert (gap < 0) == flipped


@pytest.mark.parametrize(("noise", "count"), [(0.0, 0), (0.15, 15), (0.5, 50), (1.0, 100)])
def test_the_noise_is_exact_in_every_hundred_rows(noise, count):
    flipped = flipped_rows(1000, 7, noise=noise)
    assert [sum(flipped[start : start + 100]) for start in range(0, 1000, 100)] == [count] * 10


def test_noise_changes_the_order_of_pairs_and_not_the_reviews():
    noisy, clean = preference_rows(100, 8, noise=0.15), preference_rows(100, 8, noise=0.0)
    for one, other in zip(noisy, clean, strict=True):
        assert one["prompt"] == other["prompt"]
        assert {one["chosen"], one["rejected"]} == {other["chosen"], other["rejected"]}
    assert sum(one != other for one, other in zip(noisy, clean, strict=True)) == 15


@pytest.mark.parametrize("noise", [-0.01, 0.155, 1.01])
def test_a_noise_rate_that_cannot_be_exact_is_refused(noise):
    with pytest.raises(ConfigError, match="hundredths"):
        flipped_rows(10, 0, noise=noise)


def test_held_out_things_are_in_no_row_of_the_training_split():
    names = {split: {thing.name for thing in things(split)} for split in ("train", "held_out")}
    assert not names["train"] & names["held_out"]
    assert len(names["held_out"]) == pytest.approx(len(names["train"]) / 4, rel=0.2)
    assert {thing.noun for thing in things("held_out")} <= {noun for kind in KINDS for noun in kind.nouns}
    held_out = {row["prompt"] for row in prompt_rows(3000, 0, "held_out")}
    for rows in (sft_rows(600, 0), preference_rows(300, 0), prompt_rows(3000, 0)):
        assert not held_out & {row["prompt"] for row in rows}


def test_every_prompt_names_its_thing_and_ends_its_line():
    for split in ("train", "held_out"):
        for row in prompt_rows(300, 0, split):
            assert thing_of(row["prompt"])
            assert row["prompt"].endswith("\n")


def test_an_unknown_split_is_refused():
    with pytest.raises(ConfigError, match="train, held_out"):
        prompt_rows(3, 0, "test")
