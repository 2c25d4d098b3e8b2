"""Documents of a plain text file as rows with one column, `text`. Not their cutting into blocks (`examples.py`)."""

import re
from collections.abc import Iterator

from proximo.data.rows import Row
from proximo.errors import DataError


def document_rows(text: str, source: str, *, separator: str | None) -> Iterator[Row]:
    """Documents between lines equal to `separator`; None separates at blank lines, "" makes the file one document.

    Line ends become "\\n", blank lines around a document are taken off, empty documents are passed over. Raises
    DataError where the separator is on no line of the file.
    """
    number = 0
    for document in _documents(text.replace("\r\n", "\n"), source, separator):
        content = document.strip("\n")
        if content.strip():
            number += 1
            yield Row(source=source, number=number, values={"text": content})


def _documents(text: str, source: str, separator: str | None) -> list[str]:
    if separator is None:
        return re.split(r"\n[ \t]*\n", text)
    if separator == "":
        return [text]
    documents = re.split(rf"^[ \t]*{re.escape(separator.strip())}[ \t]*$", text, flags=re.MULTILINE)
    if len(documents) == 1:
        raise DataError(
            f"{source}: no line is the separator {separator!r}; give the line that stands between documents"
        )
    return documents
