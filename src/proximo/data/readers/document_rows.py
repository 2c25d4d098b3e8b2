"""Documents of a text file as rows."""

from collections.abc import Iterable, Iterator

from proximo.data.rows import Row
from proximo.errors import DataError


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
