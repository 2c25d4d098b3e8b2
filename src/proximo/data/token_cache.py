"""Caches token ids in Parquet files, so that a tokenizer tokenises the same texts only once.

An entry is the result of one call of the tokenizer, under a SHA-256 of everything that goes into the call: the final
texts (after columns, options and chat template) and the tokenizer. Rows, phases, limits and reports are computed each
time and never come from the cache.
"""

import hashlib
import os
import uuid
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from proximo.message_text import count_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokenise = Callable[[list[str]], list[list[int]]]

MIN_TEXTS = 256
"""Fewer texts are tokenised faster than read."""
NUM_PROBED = 16
"""This many texts of every hit are tokenised again and compared, in case the key misses something."""


class TokenCache:
    """A folder with one Parquet file per list of texts and tokenizer."""

    def __init__(self, folder: Path | None) -> None:
        """The folder of the cache; None caches nothing."""
        self.folder = folder
        self._failures: list[str] = []
        self._read_texts = self._read_files = 0

    @property
    def notes(self) -> list[str]:
        """What could not be read or written, and how much was read."""
        files = count_of(self._read_files, "file")
        read = f"token cache: {count_of(self._read_texts, 'text')} read from {files} in {self.folder}"
        return [*self._failures, *([read] if self._read_files else [])]

    def ids(
        self, tokenizer: "PreTrainedTokenizerBase", texts: list[str], tokenise: Tokenise, *, within: bool
    ) -> list[list[int]]:
        """The result of `tokenise` for the texts, read from or written to the folder. `within`: texts after other text.

        A damaged file, or one whose ids differ from the tokenizer's, is replaced. If the folder cannot be used, a note
        says so and the texts are tokenised. Several processes may share it: each writes a temporary file and renames it
        when it is complete.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        # A tokenizer without a backend is Python code, which the key does not cover.
        if self.folder is None or backend is None or len(texts) < MIN_TEXTS:
            return tokenise(texts)
        key = _key(tokenizer, backend.to_str(), texts, within=within)
        path = self.folder / f"{key}.parquet"
        try:
            cached_ids = _read(path, len(texts))
            _probe(texts, cached_ids, tokenise)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError) as error:
            self._failures.append(f"token cache: {path} is unusable and is written again ({error})")
        else:
            self._read_texts, self._read_files = self._read_texts + len(texts), self._read_files + 1
            return cached_ids
        ids = tokenise(texts)
        try:
            self._write(path, ids)
        except OSError as error:
            self._failures.append(f"token cache: not saved, {path} cannot be written ({error.strerror or error})")
        return ids

    def _write(self, path: Path, ids: Sequence[Sequence[int]]) -> None:
        import pyarrow
        from pyarrow import parquet

        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".partial-{uuid.uuid4().hex}")
        table = pyarrow.table({"ids": pyarrow.array(ids, pyarrow.list_(pyarrow.int32()))})
        try:
            parquet.write_table(table, partial, write_page_checksum=True)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def _key(tokenizer: "PreTrainedTokenizerBase", backend: str, texts: Sequence[str], *, within: bool) -> str:
    """Hash of all that decides the ids; `backend` has normaliser, splits, vocabulary, merges and special tokens."""
    tokenizer_type = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__} {tokenizer.split_special_tokens}"
    versions = f"{version('transformers')} {version('tokenizers')}"
    digest = hashlib.sha256(f"{versions} {tokenizer_type}{' within' * within}\n".encode())
    for text in (backend, *texts):
        content = text.encode(errors="surrogatepass")
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def _read(path: Path, num_texts: int) -> list[list[int]]:
    """The ids of a file. Raises ValueError for a damaged one."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
    except pyarrow.ArrowException as error:
        raise ValueError(f"it is not whole: {error}") from error
    if table.column_names != ["ids"] or table.num_rows != num_texts:
        raise ValueError("its content has changed since it was written")
    return table["ids"].to_pylist()


def _probe(texts: Sequence[str], cached_ids: Sequence[list[int]], tokenise: Tokenise) -> None:
    chosen = range(0, len(texts), max(1, len(texts) // NUM_PROBED))
    again = tokenise([texts[index] for index in chosen])
    if any(list(ids) != cached_ids[index] for index, ids in zip(chosen, again, strict=True)):
        raise ValueError("its ids differ from the tokenizer's")
