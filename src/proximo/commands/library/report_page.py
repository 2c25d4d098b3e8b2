"""The report page of a run, as a path that a notebook shows inline."""

from pathlib import PosixPath

from proximo.metrics.notebook.html import page_html


class ReportPage(PosixPath):
    """The path of a report. A notebook shows the page itself, in a frame in which no script runs."""

    def _repr_html_(self) -> str | None:
        if self.suffix != ".html" or not self.is_file():  # such as a parent, which has the same type
            return None
        return page_html(self.read_text(encoding="utf-8"), title=f"Report of {self.parent.name}")
