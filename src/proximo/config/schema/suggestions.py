"""Suggests known keys for an unknown one, from the whole recipe."""

from collections.abc import Sequence
from difflib import SequenceMatcher, get_close_matches
from functools import cache, lru_cache
from itertools import groupby, islice
from typing import Any

from proximo.config.schema.fields import Path, annotation_at, key_paths

MIN_SIMILARITY = 0.75
MAX_SUGGESTIONS = 3


def suggested_value(typed: Any, offered: Sequence[Any]) -> Any:
    """The value of `offered` that was probably meant; None if none is similar to `typed`."""
    if not isinstance(typed, str):
        return None
    words = [value for value in offered if isinstance(value, str)]
    return next(iter(get_close_matches(typed.lower(), words, n=1)), None)


def suggestions(typed: Path, schema: Any, tree: Any) -> tuple[str, ...]:
    """Full paths of the known keys most similar to `typed`: at most MAX_SUGGESTIONS, without `typed` itself."""
    ranks = {path: _rank(typed, path) for path in _similar_places(typed, schema)}
    near = [path for path, rank in ranks.items() if rank[0] >= MIN_SIMILARITY]
    # Whether a path exists takes longer to find out than its rank, so the nearest are asked first.
    nearest_first = sorted(near, key=ranks.__getitem__, reverse=True)
    known = (path for path in nearest_first if annotation_at(schema, tree, path) is not None)
    _, nearest = next(groupby(known, key=ranks.__getitem__), (None, ()))
    return tuple(".".join(path) for path in islice(nearest, MAX_SUGGESTIONS))


def _rank(typed: Path, path: Path) -> tuple[float, ...]:
    """Sort key, higher for a better match: by similarity of the name, shared prefix, and shortness of the path."""
    return round(_similarity(typed, path), 6), _shared_prefix(typed, path), -len(path)


def _similar_places(typed: Path, schema: Any) -> list[Path]:
    """All other key paths of the schema, with the list indices of `typed` where it has the same lists."""
    places = dict.fromkeys(_in_place_of(typed, path) for path in _all_paths(schema))
    return [path for path in places if path != typed]


@cache
def _all_paths(schema: Any) -> tuple[Path, ...]:
    return tuple(path for path, _ in key_paths(schema))


@lru_cache(maxsize=4096)
def _ratio(name: str, end: str) -> float:
    return SequenceMatcher(None, name, end).ratio()


def _in_place_of(typed: Path, path: Path) -> Path:
    shared = 0
    for mine, theirs in zip(typed, path, strict=False):
        if mine != theirs and not (mine.isdecimal() and theirs.isdecimal()):
            break
        shared += 1
    return (*typed[:shared], *path[shared:])


def _similarity(typed: Path, path: Path) -> float:
    """Similarity of two keys, from 0 to 1: 1 for the same name in any section.

    The name is also compared with the last two parts of the path: `kl_coef` with `kl.coefficient`."""
    name = typed[-1].lower().replace("-", "_")
    ends = (path[-1], "_".join(path[-2:]))
    if name in ends:
        return 1.0
    same_section, words = typed[:-1] == path[:-1], set(name.split("_"))
    if same_section and len(words) > 1 and words < set(path[-1].split("_")):
        return 1.0  # `max_tokens` for `max_prompt_tokens`
    # A typo in the right section is more likely than a key of another section.
    nearby = 0.1 if same_section else 0.0
    shortened = 0.8 if len(name) >= 3 and path[-1].startswith(name) else 0.0
    return min(0.99, nearby + max(shortened, *(_ratio(name, end) for end in ends)))


def _shared_prefix(typed: Path, path: Path) -> int:
    return next((index for index, pair in enumerate(zip(typed, path, strict=False)) if pair[0] != pair[1]), len(path))
