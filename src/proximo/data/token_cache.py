"""Token ids on disk, so that the same texts are tokenised once by the same tokenizer. Not data sets, not options.

What is kept is what one call of the tokenizer returns, under a SHA-256 of all that goes into the call: the texts as
they are given to it (after columns, options and chat template have done their part) and the tokenizer itself. Rows,
phases, limits and reports are worked out each time, so that nothing but that call can come out of the cache.
"""

import hashlib
import os
import uuid
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from proximo.message_text import count_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokenise = Callable[[list[str]], list[list[int]]]

LAYOUT = 1
"""Of the file; a change of it is another key."""
MIN_TEXTS = 256
"""Fewer are tokenised sooner than read."""
NUM_PROBED = 16
"""So many texts of every hit are tokenised again and compared: a key may forget something, this does not."""


class TokenCache:
    """Owns a folder with one file per list of texts and tokenizer, and tells in `notes` what became of each."""

    def __init__(self, folder: Path | None) -> None:
        """The folder of the cache; None caches nothing."""
        self.folder = folder
        self.notes: list[str] = []
        self._read_texts = self._read_files = 0

    def ids(
        self, tokenizer: "PreTrainedTokenizerBase", texts: list[str], tokenise: Tokenise, *, within: bool
    ) -> list[list[int]]:
        """What `tokenise` returns for the texts, from the folder or into it. `within`: for texts behind other text.

        A file that is damaged, or whose ids are not those of the tokenizer, is replaced. A folder that cannot be used
        costs a note and the time of tokenising, not the run. Several processes may share it: each writes a file of
        its own and renames it when it is whole.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        # A tokenizer without a backend is Python code, which no digest covers.
        if self.folder is None or backend is None or len(texts) < MIN_TEXTS:
            return tokenise(texts)
        key = _key(tokenizer, backend.to_str(), texts, within=within)
        path = self.folder / f"{key}.safetensors"
        try:
            cached_ids = _read(path, len(texts))
            _probe(texts, cached_ids, tokenise)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            self.notes.append(f"token cache: {path} is of no use and is made anew ({error})")
        else:
            self._note_read(len(texts), path)
            return cached_ids
        ids = tokenise(texts)
        try:
            self._write(path, ids)
        except OSError as error:
            self.notes.append(f"token cache: nothing is kept, {path} cannot be written ({error.strerror or error})")
        return ids

    def _note_read(self, num_texts: int, path: Path) -> None:
        """One note, however many portions a load has."""
        earlier = f"token cache: {count_of(self._read_texts, 'text')} read from "
        self.notes = [note for note in self.notes if not note.startswith(earlier)]
        self._read_texts, self._read_files = self._read_texts + num_texts, self._read_files + 1
        place = path if self._read_files == 1 else f"{self._read_files:,} files in {self.folder}"
        self.notes.append(f"token cache: {count_of(self._read_texts, 'text')} read from {place}")

    def _write(self, path: Path, ids: Sequence[Sequence[int]]) -> None:
        lengths = np.array([len(text_ids) for text_ids in ids], dtype=np.int64)
        flat = np.fromiter((token for text_ids in ids for token in text_ids), dtype=np.int32, count=int(lengths.sum()))
        data = save({"ids": flat, "lengths": lengths}, metadata={"digest": _digest(flat, lengths)})
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".partial-{uuid.uuid4().hex}")
        try:
            partial.write_bytes(data)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def _key(tokenizer: "PreTrainedTokenizerBase", backend: str, texts: Sequence[str], *, within: bool) -> str:
    """All that the ids are made of: normaliser, splits, vocabulary, merges and special tokens stand in `backend`."""
    tokenizer_type = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__} {tokenizer.split_special_tokens}"
    versions = f"{LAYOUT} {version('transformers')} {version('tokenizers')}"
    digest = hashlib.sha256(f"{versions} {tokenizer_type}{' within' * within}\n".encode())
    for text in (backend, *texts):
        content = text.encode(errors="surrogatepass")
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def _read(path: Path, num_texts: int) -> list[list[int]]:
    """Raises ValueError for content that is not what was written, and what safetensors raises."""
    with safe_open(path, framework="numpy") as file:
        flat, lengths, digest = file.get_tensor("ids"), file.get_tensor("lengths"), file.metadata()["digest"]
    if digest != _digest(flat, lengths) or len(lengths) != num_texts:
        raise ValueError("its content has changed since it was written")
    ends = np.cumsum(lengths).tolist()
    ids = flat.tolist()
    return [ids[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]


def _probe(texts: Sequence[str], cached_ids: Sequence[list[int]], tokenise: Tokenise) -> None:
    chosen = range(0, len(texts), max(1, len(texts) // NUM_PROBED))
    again = tokenise([texts[index] for index in chosen])
    if any(list(ids) != cached_ids[index] for index, ids in zip(chosen, again, strict=True)):
        raise ValueError("its ids are not those of the tokenizer")


def _digest(flat: np.ndarray, lengths: np.ndarray) -> str:
    return hashlib.sha256(flat.tobytes() + lengths.tobytes()).hexdigest()
