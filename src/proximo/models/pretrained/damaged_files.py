"""Finds the damaged file of a model's folder, and what is wrong. Reads no tensor.

Called after a library could not read the folder; for files that libraries skip silently, before they read it.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

GENERATION = "generation_config.json"
JSON_OBJECTS = (
    "config.json",
    GENERATION,
    "adapter_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "model.safetensors.index.json",
)
TEXTS = ("chat_template.jinja", "merges.txt")
WEIGHTS = "*.safetensors"
SHORTEST_KEY = 6
"""Least number of letters: shorter keys (top_k, top_p) may differ in one letter and both be valid."""
LARGEST_HEADER = 100_000_000
"""Largest header in bytes, as in safetensors itself."""
SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
"""Bytes of a number, by the names of safetensors; one for all others."""


def damage_in(folder: Path, *, weights: bool = True) -> str | None:
    """The first file with contents that do not fit its name, with the problem; None if none was found.

    `weights` looks at the headers of weight files too.
    """
    for name in (*JSON_OBJECTS, *TEXTS):
        file = folder / name
        if file.exists() and (problem := _guarded(file)):
            return f"{file} {problem}"
    for file in sorted(folder.glob(WEIGHTS)) if weights else ():
        if problem := _guarded(file):
            return f"{file} {problem}"
    return None


def overlooked_damage_in(folder: Path) -> str | None:
    """The first damaged file that libraries would treat as missing; None if none was found.

    Without its generation config a model has other tokens that end an answer, without its tokenizer's config other
    special tokens, without its template another form of a conversation.
    """
    for name in (*JSON_OBJECTS, *TEXTS):
        file = folder / name
        if file.is_dir() or (name == GENERATION and file.exists()):
            problem = _guarded(file)
            if problem:
                return f"{file} {problem}"
    return None


def misspelt_key(file: Path, known: Iterable[str]) -> str | None:
    """The problem if a key of the JSON object in `file` is a known key with one letter changed; else None.

    Libraries ignore such a key, and use the default of the intended one. None also for a file without a JSON object.
    """
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(saved, dict):
        return None
    missing = set(known) - saved.keys()
    for key in saved.keys() - set(known):
        for meant in missing if len(key) >= SHORTEST_KEY else ():
            if len(meant) == len(key) and sum(a != b for a, b in zip(meant, key, strict=True)) == 1:
                return f"{file} has the key {key!r} where {meant!r} is meant: it is damaged; copy or fetch it again"
    return None


def _guarded(file: Path) -> str | None:
    try:
        if file.is_dir():
            return "is a folder, but must be a file"
        if file.stat().st_size == 0:
            return "is empty: copy or fetch it again"
        if file.suffix == ".safetensors":
            return _weights_problem(file)
        return _text_problem(file)
    except OSError as error:
        return f"cannot be opened: {error.strerror or error}"


def _text_problem(file: Path) -> str | None:
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix != ".json":
            return None
        content = json.loads(text)
    except UnicodeDecodeError as error:
        return f"is not text in UTF-8 (byte {error.start}): it is damaged or of another kind; copy or fetch it again"
    except RecursionError:
        return "is not usable JSON: it is nested too deeply"
    except ValueError as error:
        return f"is not complete JSON ({error}): it was cut or damaged; copy or fetch it again"
    return _object_problem(file.name, content)


def _object_problem(name: str, content: Any) -> str | None:
    if not isinstance(content, dict):
        return f"holds a JSON {type(content).__name__}, but must hold an object: it is a file of another kind"
    if name == "tokenizer.json" and not isinstance(content.get("model"), dict):
        return "is JSON without a `model`, so it is not a tokenizer's: copy or fetch it again"
    return None


def _weights_problem(file: Path) -> str | None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(LARGEST_HEADER, size - 8):
            return (
                f"is not a complete safetensors file ({size} bytes with a header of {length}): copy or fetch it again"
            )
        try:
            header = json.loads(stream.read(length))
            ends = [(name, each) for name, each in header.items() if name != "__metadata__"]
            wanted = 8 + length + max((each["data_offsets"][1] for _, each in ends), default=0)
            for name, each in ends:
                begin, end = each["data_offsets"]
                numbers = 1
                for extent in each["shape"]:
                    numbers *= extent
                if end - begin != numbers * SIZES.get(each["dtype"], 1):
                    return f"has two sizes for the tensor {name!r}: its header is damaged; copy or fetch it again"
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            return "has a damaged header and is not a safetensors file; copy or fetch it again"
    if size != wanted:
        how = "was cut" if size < wanted else "has too many bytes"
        return f"{how}: it has {size} of {wanted} bytes; copy or fetch it again"
    return None
