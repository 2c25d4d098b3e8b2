"""Pairs from a labelled set: chosen and rejected by label, none twice, every text about equally often, seeded."""

from collections import Counter
from pathlib import Path

import pytest

from proximo.errors import DataError
from proximo.recipes.pairing import label_pairs


@pytest.fixture
def labelled(tmp_path: Path) -> str:
    """Four good texts, six bad ones."""
    lines = [
        f"{label},{name}{index}" for label, name, count in ((1, "good", 4), (0, "bad", 6)) for index in range(count)
    ]
    (tmp_path / "set.csv").write_text("label,text\n" + "\n".join(lines) + "\n")
    return str(tmp_path / "set.csv")


@pytest.mark.parametrize("num_pairs", [1, 5, 6, 12, 13, 24])
def test_pairs_are_distinct_and_use_every_text_about_equally(labelled: str, num_pairs: int) -> None:
    pairs = [(row["chosen"], row["rejected"]) for row in label_pairs(path=labelled, num_pairs=num_pairs)]
    assert len(set(pairs)) == len(pairs) == num_pairs
    for side, name, count in ((0, "good", 4), (1, "bad", 6)):
        used = Counter(pair[side] for pair in pairs)
        assert all(text.startswith(name) for text in used)
        assert max(used.values()) <= -(-num_pairs // count)


def test_without_a_number_each_text_comes_at_least_once(labelled: str) -> None:
    rows = list(label_pairs(path=labelled))
    assert len(rows) == 6
    assert len({row["chosen"] for row in rows} | {row["rejected"] for row in rows}) == 10
    assert {row["prompt"] for row in rows} == {""}


def test_the_seed_decides_and_the_labels_can_be_turned_round(labelled: str) -> None:
    assert list(label_pairs(path=labelled)) == list(label_pairs(path=labelled, seed=0))
    assert list(label_pairs(path=labelled)) != list(label_pairs(path=labelled, seed=1))
    assert all(row["chosen"].startswith("bad") for row in label_pairs(path=labelled, chosen=0, rejected=1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_pairs": 25}, r"25 pairs are wanted; 4 texts labelled 1 and 6 labelled 0 make 1 to 24"),
        ({"num_pairs": 0}, "0 pairs are wanted"),
        ({"text": "texts"}, r"row 1 \(line 2\): no column 'texts'; columns found: 'label', 'text'; nearest: 'text'"),
        ({"chosen": 2}, r"no row has label 2; labels found: 0, 1"),
    ],
)
def test_what_cannot_be_paired_is_refused(labelled: str, arguments: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(label_pairs(path=labelled, **arguments))
