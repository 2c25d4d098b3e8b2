"""For runs that are interrupted in this process: what costs time and computes nothing is left out."""

import pytest

from proximo.models import loading
from proximo.run import journal


@pytest.fixture
def no_report_no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take longer than tiny runs, probes of models draw nothing, and to lose what is not synced takes power."""
    monkeypatch.setattr(journal, "write_report", lambda folder: folder / "report.html")
    for name in ("probe_language_model", "probe_scalar_model"):
        monkeypatch.setattr(loading, name, lambda model: None)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
