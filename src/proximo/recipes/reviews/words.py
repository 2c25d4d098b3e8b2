"""The words of the embedded example: kinds of things, their parts, and opinions of them.

Four kinds of things (kitchenware, places to stay, places to eat, films), each with its own parts, its own verb and its
own opinion words; every other word serves all kinds. All words are lower case, and no word belongs to two kinds.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of thing, with the words that fit it and no other kind."""

    nouns: tuple[str, ...]
    """Nouns of the things."""
    traits: tuple[str, ...]
    """Traits by which prompts distinguish things; `{}` is replaced by the noun."""
    did: str
    """Verb for the reviewer's use of the thing."""
    part: tuple[str, ...]
    """Parts of the thing, singular."""
    parts: tuple[str, ...]
    """Parts of the thing, plural."""
    good: tuple[str, ...]
    """Opinion words that praise a thing of this kind."""
    bad: tuple[str, ...]
    """Opinion words that blame a thing of this kind."""


GOODS = ("blue {}", "red {}", "black {}", "old {}", "small {}", "new {}")
PLACES = ("{} by the lake", "{} on the hill", "{} near the station", "{} by the church", "new {}", "small {}")
STORIES = ("{} about two sisters", "{} about a thief", "{} about the sea", "{} about a lost dog", "old {}", "new {}")

KINDS = (
    Kind(
        nouns=("kettle", "toaster", "blender", "teapot", "pan", "mixer"),
        traits=GOODS,
        did="bought",
        part=("handle", "lid", "base"),
        parts=("sides", "knobs"),
        good=("sturdy", "handy"),
        bad=("flimsy", "clumsy"),
    ),
    Kind(
        nouns=("hotel", "cabin", "hostel", "inn", "lodge", "motel"),
        traits=PLACES,
        did="stayed at",
        part=("room", "bed", "lobby"),
        parts=("towels", "walls"),
        good=("clean", "cosy"),
        bad=("dirty", "shabby"),
    ),
    Kind(
        nouns=("cafe", "bakery", "diner", "tavern", "bistro", "canteen"),
        traits=PLACES,
        did="ate at",
        part=("soup", "bread", "coffee"),
        parts=("cakes", "pies"),
        good=("tasty", "fresh"),
        bad=("bland", "stale"),
    ),
    Kind(
        nouns=("film", "movie", "comedy", "drama", "western", "musical"),
        traits=STORIES,
        did="watched",
        part=("plot", "music", "ending"),
        parts=("scenes", "actors"),
        good=("moving", "funny"),
        bad=("boring", "silly"),
    ),
)

GOOD = ("great", "good", "nice", "lovely", "excellent", "perfect")
"""Opinion words that praise anything."""
BAD = ("bad", "poor", "awful", "terrible", "ugly", "weak")
"""Opinion words that blame anything."""
LIKED = ("love", "like")
DISLIKED = ("hate", "dislike")

WHO = ("i", "we")
WHEN = ("last week", "last month", "yesterday", "in spring", "twice", "with a friend", "with my family")
ADVERBS = ("very", "really", "so", "quite")
SUMMARIES = ("overall", "in short", "all in all")

PROMPTS = (
    "Review of the {thing}:\n",
    "My review of the {thing}:\n",
    "What I think of the {thing}:\n",
    "A few words on the {thing}:\n",
    "An honest look at the {thing}:\n",
    "Tell me about the {thing}.\n",
    "How was the {thing}?\n",
    "Is the {thing} any good?\n",
)
"""Prompts for a review. All end with a line break, so that a review starts on its own line."""
