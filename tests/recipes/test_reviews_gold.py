"""The gold score of the embedded example: worked by hand, and attacked with text that is no review."""

import random
import re

import pytest

from proximo.errors import DataError
from proximo.recipes.reviews.gold import COMPONENTS, gold_components, gold_reward, gold_score, thing_of
from proximo.recipes.reviews.grammar import FRAMES, SLOTS, opinion_of, read_clause, read_sentence, well_formed
from proximo.recipes.reviews.words import BAD, GOOD, KINDS, PROMPTS
from proximo.rewards.function_binding import import_function

KETTLE = "Review of the blue kettle:\n"
OPENING = "I bought the kettle last week."
LID = "The lid is very good."
HANDLE = "We love the handle."
VERDICT = "Overall it is an excellent kettle."
CLOSING = "You should try it."
BEST = f"{OPENING} {LID} {VERDICT} {CLOSING}"
FLAWLESS = dict.fromkeys(COMPONENTS, 1.0)


def flawed(**changes: float) -> dict[str, float]:
    return {**FLAWLESS, **changes}


@pytest.mark.parametrize(
    ("review", "expected"),
    [
        (BEST, FLAWLESS),
        (f"{LID} {HANDLE} {VERDICT}", FLAWLESS),
        # What the reviewer thinks: praise among the opinions of all clauses; the opening has none.
        (f"{OPENING} The lid is very bad. {VERDICT} {CLOSING}", flawed(opinion=2 / 3)),
        (f"{OPENING} The lid is not good. {VERDICT} {CLOSING}", flawed(opinion=2 / 3)),
        (f"{OPENING} The lid is not bad. {VERDICT} {CLOSING}", FLAWLESS),
        (f"{OPENING} The lid is good but the base is weak. {VERDICT}", flawed(opinion=2 / 3)),
        (f"{OPENING} The lid is bad. In short the kettle was ugly. You should avoid it.", flawed(opinion=0.0)),
        (f"{OPENING} This is about the kettle. A friend told me about the kettle.", flawed(opinion=0.0)),
        # Form: the share of sentences that the grammar reads, written as they should be.
        (f"i bought the kettle last week. {LID} {VERDICT} {CLOSING}", flawed(form=3 / 4)),
        (f"{OPENING} {LID} {VERDICT} You should try it", flawed(form=3 / 4)),
        (f"{OPENING} {LID} {VERDICT} You should", flawed(form=3 / 4)),
        (f"{OPENING} {LID} Overall it is a excellent kettle. {CLOSING}", flawed(form=3 / 4)),
        (f"{OPENING} The lid are very good. {VERDICT} {CLOSING}", flawed(form=3 / 4)),
        (f"{OPENING} The lid is good but the base is nice. {VERDICT}", flawed(form=2 / 3)),
        (f"{OPENING}  {LID} {VERDICT} {CLOSING}", flawed(form=3 / 4)),
        # Topic: the words of other kinds of things among those of any kind, and whether the thing is named.
        (f"{OPENING} The soup is very good. {VERDICT} {CLOSING}", flawed(topic=3 / 4)),
        (f"{OPENING} The lid is very tasty. {VERDICT} {CLOSING}", flawed(topic=4 / 5)),
        (f"I bought the pan last week. {LID} {VERDICT} {CLOSING}", flawed(topic=3 / 4)),
        (f"{LID} {HANDLE} {CLOSING}", flawed(topic=1 / 2)),
        # Variety: the smaller of the shares of different sentences and of different parts.
        (f"{OPENING} {OPENING} {LID} {VERDICT}", flawed(variety=3 / 4)),
        (f"{LID} The handle is very good. {VERDICT}", flawed()),
        (f"{LID} We love the lid. {VERDICT}", flawed(variety=1 / 2)),
        # Shape: 3 to 4 sentences, from the opening to the closing.
        (f"{OPENING} {VERDICT}", flawed(shape=2 / 3)),
        (f"{OPENING} {LID} {HANDLE} {VERDICT} {CLOSING}", flawed(shape=3 / 4)),
        (f"{CLOSING} {OPENING} {LID} {VERDICT}", flawed(shape=2 / 3)),
        (f"{VERDICT} {LID} {OPENING}", flawed(shape=0.0)),
    ],
)
def test_components_are_those_worked_by_hand(review, expected):
    assert gold_components(KETTLE, review) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("review", "expected"),
    [
        (BEST, 1.0),
        (f"{OPENING} The lid is bad. In short the kettle was ugly. You should avoid it.", 1 / 5),
        (f"{OPENING} The lid is very bad. {VERDICT}", 3 / 5),
        (f"i bought the kettle last week. The soup is bad. {VERDICT}", 3 / 5 * 2 / 3 * 3 / 4),
    ],
)
def test_gold_is_the_stars_times_what_the_text_is_worth(review, expected):
    assert gold_score(KETTLE, review) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        ".",
        "....",
        "great",
        "Great great great great great great great.",
        "Great. Lovely. Perfect. Excellent.",
        "The kettle is great lovely perfect excellent and the lid handle base sides knobs are sturdy handy.",
        "The lid is good and the base is nice and the handle is great and the sides are lovely and we love the knobs.",
        KETTLE,
        f"{KETTLE}{KETTLE}{KETTLE}",
        BEST.replace(".", ""),
        BEST.lower().replace(".", ";"),
        BEST[::-1],
        "I recommend it. It made my day. You should try it. It is worth the money.",
        f"{OPENING} This is about the kettle. A friend told me about the kettle.",
    ],
)
def test_text_that_is_no_review_is_worth_less_than_a_quarter(text):
    assert gold_score(KETTLE, text) < 0.25


@pytest.mark.parametrize("sentence", [LID, HANDLE, VERDICT, CLOSING])
def test_the_best_sentence_over_and_over_is_worth_at_most_a_third(sentence):
    assert max(gold_score(KETTLE, " ".join([sentence] * times)) for times in range(1, 9)) <= 1 / 3


def test_every_frame_filled_with_any_words_is_read_back_with_its_opinion():
    rng = random.Random(1)
    for frame in FRAMES:
        for _ in range(40):
            words = {slot: rng.choice(SLOTS[slot]) for slot in re.findall(r"{(\w+)}", frame.text)}
            voiced = sum(map(opinion_of, words.values()))
            assert read_clause(frame.text.format(**words)) == (frame.role, frame.states or frame.sign * voiced)


def test_sentences_are_read_whatever_their_capitals_but_only_one_way_is_well_formed():
    for sentence in ("the lid is good.", "The Lid is good.", "The lid is good", "The lid is good. "):
        assert not well_formed(sentence)
    assert read_sentence("the LID is good")[0].opinion == 1
    assert well_formed("The lid is good.")
    assert well_formed("In short I love the kettle.")
    assert not well_formed("In short i love the kettle.")


def test_no_word_belongs_to_two_kinds_or_stands_where_every_kind_may_use_it():
    own = [word for kind in KINDS for word in (*kind.nouns, kind.did.split()[0], *kind.part, *kind.parts)]
    own += [word for kind in KINDS for word in (*kind.good, *kind.bad)]
    assert len(own) == len(set(own))
    shared = {*GOOD, *BAD, *(word for text in (*PROMPTS, *(f.text for f in FRAMES)) for word in text.lower().split())}
    traits = {word for kind in KINDS for trait in kind.traits for word in trait.split()}
    assert not set(own) & (shared | traits)


def test_prompts_that_name_no_thing_or_two_are_refused_with_what_was_wanted():
    assert thing_of("How was the inn by the lake?\n") == "inn"
    for prompt in ("How was the weather?", "The hotel and the film:"):
        with pytest.raises(DataError, match="names one thing of the example"):
            thing_of(prompt)


def test_the_reward_function_gives_the_score_and_its_components():
    function = import_function("proximo.recipes.reviews.gold:gold_reward")
    assert function is gold_reward
    scored = function([KETTLE, KETTLE], [BEST, ""], [{}, {}])
    assert scored == [{"score": 1.0, **FLAWLESS}, {"score": 0.0, **gold_components(KETTLE, "")}]
    with pytest.raises(ValueError, match="shorter"):
        function([KETTLE, KETTLE], [BEST], [{}, {}])
