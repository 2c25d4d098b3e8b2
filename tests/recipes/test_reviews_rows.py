"""The data sets of the embedded example: what its pairs are, how noisy they are, which things are held out."""

import hashlib
import json

import pytest

from proximo.errors import ConfigError
from proximo.recipes.reviews.gold import gold_score, thing_of
from proximo.recipes.reviews.review_rows import flipped_rows, preference_rows, prompt_rows, sft_rows, things
from proximo.recipes.reviews.words import KINDS


def test_a_prompt_is_a_function_of_seed_and_position():
    assert prompt_rows(120, 3)[:30] == prompt_rows(30, 3) != prompt_rows(30, 4)


@pytest.mark.parametrize(
    ("rows", "digest"),
    [
        (lambda: sft_rows(12200), "6e8775100d46cf68"),
        (lambda: preference_rows(12400), "b1f9a196a77b6396"),
        (lambda: prompt_rows(300, 5), "968c7e0f272405e9"),
    ],
)
def test_the_rows_are_those_that_the_published_figures_were_measured_on(rows, digest):
    assert hashlib.sha256(json.dumps(rows()).encode()).hexdigest().startswith(digest)


def test_pairs_are_in_the_order_of_gold_but_for_the_rows_that_are_said_to_be_flipped():
    for row, flipped in zip(preference_rows(300), flipped_rows(300), strict=True):
        gap = gold_score(row["prompt"], row["chosen"]) - gold_score(row["prompt"], row["rejected"])
        assert abs(gap) >= 0.02
        assert (gap < 0) == flipped


@pytest.mark.parametrize(("noise", "count"), [(0.0, 0), (0.15, 15), (1.0, 100)])
def test_the_noise_is_exact_in_every_hundred_rows(noise, count):
    flipped = flipped_rows(1000, noise=noise)
    assert [sum(flipped[start : start + 100]) for start in range(0, 1000, 100)] == [count] * 10


def test_what_cannot_be_given_is_refused():
    for noise in (-0.01, 0.155, 1.01):
        with pytest.raises(ConfigError, match="hundredths"):
            flipped_rows(10, noise=noise)
    with pytest.raises(ConfigError, match="train, held_out"):
        prompt_rows(3, 0, "test")
    with pytest.raises(ConfigError, match="12,200 rows of texts, and num_rows is 12,201"):
        sft_rows(12201)


def test_held_out_things_are_in_no_row_of_the_training_split():
    train, held_out = set(things("train")), set(things("held_out"))
    assert not train & held_out
    assert len(held_out) == pytest.approx(len(train) / 4, rel=0.2)
    assert {noun for name in held_out for noun in name.split()} >= {noun for kind in KINDS for noun in kind.nouns}
    asked = {row["prompt"] for row in prompt_rows(3000, 0, "held_out")}
    for rows in (sft_rows(12200), preference_rows(12400), prompt_rows(3000, 0)):
        assert not asked & {row["prompt"] for row in rows}


def test_every_prompt_names_its_thing_and_ends_its_line():
    for split in ("train", "held_out"):
        for row in prompt_rows(300, 0, split):
            assert thing_of(row["prompt"])
            assert row["prompt"].endswith("\n")
