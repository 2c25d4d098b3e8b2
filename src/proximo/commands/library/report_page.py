"""The report page of a run, as a path that a notebook shows inline."""

from html import escape
from pathlib import PosixPath

FRAME = '<iframe title="report" sandbox="" style="width: 100%; height: 640px; border: 0" srcdoc="{page}"></iframe>'


class ReportPage(PosixPath):
    """The path of a report. A notebook shows the page itself, in a frame in which no script runs."""

    def _repr_html_(self) -> str | None:
        if self.suffix != ".html" or not self.is_file():  # for example a parent, which has the same type
            return None
        return FRAME.format(page=escape(self.read_text(encoding="utf-8")))
