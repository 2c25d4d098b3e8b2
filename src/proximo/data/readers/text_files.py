"""Reads a file as UTF-8 text, as lines or as documents, or raises an error that says why it is not text."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from proximo.data.rows import Row
from proximo.errors import DataError

_UTF8_MARK = b"\xef\xbb\xbf"
_NOT_TEXT = {
    b"\xff\xfe": "is UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "is UTF-16 text; save it as UTF-8",
    b"\x1f\x8b": "is compressed with gzip; unpack it",
    b"PK\x03\x04": "is a zip archive; unpack it",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd; unpack it",
    b"BZh": "is compressed with bzip2; unpack it",
    b"\xfd7zXZ": "is compressed with xz; unpack it",
    b"PAR1": "is a Parquet file; name it .parquet or set `format: parquet`",
    b"version https://git-lfs": "is a Git LFS pointer, not the data; fetch the file with `git lfs pull`",
}


def file_lines(path: Path, label: str, *, line_word: str = "line") -> Iterator[str]:
    """The lines of a UTF-8 file with their line ends, without a byte order mark, read lazily.

    Only "\\n" ends a line: JSON strings may hold U+2028 and others that str.splitlines would cut at. `line_word`: the
    word for a line in messages ("row" if each line is a row). Raises DataError for a file that cannot be read, is
    empty, is compressed or UTF-16, or holds bytes that are not UTF-8 (naming line and byte).
    """
    is_empty = True
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                content = line
                if number == 1:
                    content = line.removeprefix(_UTF8_MARK)
                    refuse_other_than_text(content, label)
                is_empty = is_empty and not content.strip()
                yield _decode(content, f"{label}, {line_word} {number}")
    except OSError as error:
        raise DataError(f"{label}: the file cannot be read: {error.strerror or error}") from error
    if is_empty:
        raise DataError(f"{label}: the file is empty ({path.stat().st_size} bytes)")


def begins_with(mark: bytes, path: Path) -> bool:
    """Whether `mark` is the first byte of a file after white space. False for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            first = next((content for line in file if (content := line.removeprefix(_UTF8_MARK).strip())), b"")
    except OSError:
        return False
    return first.startswith(mark)


def refuse_other_than_text(data: bytes, label: str) -> None:
    """Raises DataError for data that begins like a compressed file, a table or text in another encoding."""
    for beginning, reason in _NOT_TEXT.items():
        if data.startswith(beginning):
            raise DataError(f"{label}: {reason}")


def _decode(line: bytes, place: str) -> str:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        wrong = f"byte {error.start + 1} of the line (0x{line[error.start]:02x})"
        raise DataError(f"{place}: {wrong} is not UTF-8; save the file as UTF-8") from error
    if "\x00" in text:
        raise DataError(f"{place} holds NUL; the file is UTF-16 or not text at all")
    return text


def document_rows(lines: Iterable[str], source: str, *, separator: str | None) -> Iterator[Row]:
    """Documents between lines equal to `separator`; None separates at blank lines, "" makes the file one document.

    `lines` keep their line ends; "\\r\\n" becomes "\\n". Empty lines around a document are removed, empty documents
    are skipped. Raises DataError if no line of the file equals the separator.
    """
    number = 0
    for document in _documents(lines, source, separator):
        content = document.strip("\n")
        if content.strip():
            number += 1
            yield Row(source=source, number=number, values={"text": content})


def _documents(lines: Iterable[str], source: str, separator: str | None) -> Iterator[str]:
    between = None if separator == "" else (separator or "").strip()
    document: list[str] = []
    is_divided = False
    for line in lines:
        if line.strip(" \t\r\n") == between:
            yield "".join(document)
            document, is_divided = [], True
        else:
            document.append(line.replace("\r\n", "\n"))
    if separator and not is_divided:
        raise DataError(f"{source}: no line is the separator {separator!r}; give the line that separates documents")
    yield "".join(document)
