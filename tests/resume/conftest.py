"""For runs that are interrupted in this process: what costs time and computes nothing is left out."""

import pytest

from proximo.run import journal


@pytest.fixture
def no_report_no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take longer than tiny runs, and a killed process loses nothing that was not synced: only power does."""
    monkeypatch.setattr(journal, "write_report", lambda folder: folder / "report.html")
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
